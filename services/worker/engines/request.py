"""The types of the engine's input, requests, and of its output, one report per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from motet.policies.cluster.describe import brief_of, picture_brief
from motet.policies.step.cold_start import AssistRates
from motet.policies.times.step_record import Step
from motet.policies.worker.probe import Reading
from motet.shared.errors import MotetError
from motet.shared.model import AdapterRef, FinishReason, Mechanism, RequestBrief, SamplingParams, Tier
from motet.shared.wire.request import GenerateRequest, pack_tokens
from motet.shared.wire.stream import StreamItem

if TYPE_CHECKING:
    from motet.services.worker.engines.adapter_weights import HostAdapter


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """What one native engine can hold, in tokens and blocks; fixed for the engine's life."""

    max_running: int  # sequences in one step
    block_size: int  # tokens in one KV block
    kv_blocks: int
    max_model_len: int = 0  # longest prompt plus output; 0 for the model's own


class EngineRequest(GenerateRequest, frozen=True, kw_only=True):
    """A request in a worker. The first new token has the index `output_tokens`."""

    arrival_s: float  # shared.clock.now_s at the worker
    cache_scope: bytes = b""  # the tenants that may share its KV blocks (policies.memory.kv_blocks.cache_scope)
    kv_wait_s: float = 0.0  # the longest time to wait for KV blocks from where it has moved; 0: they are computed
    weights: HostAdapter | None = None  # of its adapter, when an engine gets it
    copies: tuple[HostAdapter, ...] = ()  # of a picture's adapters, in the order of `weighted`, when an engine gets it

    def brief(self, output_tokens: int, *, running: bool = False) -> RequestBrief:
        """The facts of the request that schedulers need. `output_tokens`: so far."""
        brief = brief_of(
            self,
            predicted_tokens=self.predicted_tokens,
            epoch=self.epoch,
            output_tokens=output_tokens,
            phase="running" if running else "waiting",
            cached_tokens=self.cached_tokens,
        )
        return brief if self.image is None else picture_brief(brief, self.image, self.weighted)

    def item(self, index: int, finish: FinishReason | None = None, *, error: MotetError | None = None) -> StreamItem:
        """An item without tokens for the request's gateway. `index`: of the next output token."""
        info = None if error is None else error.info()
        return StreamItem(self.request_id, self.epoch, index, [], finish, error=info)

    @classmethod
    def local(
        cls,
        request_id: str,
        prompt: Iterable[int],
        sampling: SamplingParams,
        *,
        output: Iterable[int] = (),
        weights: HostAdapter | None = None,
        gateway_id: str = "",
        arrival_s: float = 0.0,
        **more: Any,
    ) -> EngineRequest:
        """A request that no message brought: a warm-up's, a benchmark's or a test's. `prompt`, `output`: token ids."""
        adapter = None
        if weights is not None:
            size_bytes = weights.blob_bytes
            adapter = AdapterRef(name=weights.digest, digest=weights.digest, rank=weights.rank, size_bytes=size_bytes)
        return cls(
            request_id=request_id,
            gateway_id=gateway_id,
            prompt=pack_tokens(prompt),
            output=pack_tokens(output),
            sampling=sampling,
            adapter=adapter,
            weights=weights,
            arrival_s=arrival_s,
            **more,
        )


@dataclass(slots=True)
class ResidencyChange:
    """An adapter version came to the device (`tier` "device"; its copy took `took_s`, 0: unknown) or left it (`tier` None)."""

    digest: str
    tier: Tier | None
    took_s: float = 0.0


@dataclass(slots=True)
class CopyStats:
    """Adapter copies that run beside the steps, and what CPU processes did; counts are since the last step."""

    link_bytes: int
    bytes_per_s: float
    under_way: int
    assist: AssistRates | None = None  # of the CPU processes; None without any, or before they have been measured
    rows: dict[str, int] = field(default_factory=dict)  # rows times layers by where: processes, device, in_place
    failures: dict[str, int] = field(default_factory=dict)  # of processes, by reason

    @property
    def processes(self) -> int:
        """CPU processes that are alive and measured."""
        return self.assist.processes if self.assist is not None else 0


@dataclass(slots=True)
class MergeStats:
    """Statistics of merging in one step, from an engine that can merge adapters."""

    merged: str  # digest of the one that was, "" for none
    switched: bool  # another one, or none, than in the step before
    resting: int  # running requests that the step left out
    bytes: int  # KV memory that is lent to the merged copy
    lora_share: float  # what LoRA adds to a step of the present requests


DrawingStage = Literal["encode", "denoise", "decode"]


@dataclass(slots=True)
class DrawingStats:
    """What one step of an image engine did, which has requests of one picture size."""

    stage: DrawingStage
    pixels: int  # of each picture
    pictures: int  # requests in the step; 0 when it failed
    rows: int = 0  # of a denoising step, two for a request with guidance
    knee_rows: int = 0  # how many it should have
    took_s: float = 0.0
    checkpoint_bytes: int = 0  # sent to gateways
    previews: int = 0  # sent to gateways


class StepStats(Step, kw_only=True):
    """The step record of a live engine: what step times depend on, and facts for metrics and requests."""

    cached_tokens: int = 0  # tokens that admissions found in the prefix cache
    preempted: int = 0
    adapters_loaded: int = 0  # whole since the last step
    cold_starts: list[tuple[str, str]] = []  # mode and reason of those that joined while or after
    cold_errors_ms: list[tuple[str, float]] = []  # mode, time to first token beyond the predicted one
    copies: CopyStats | None = None
    merging: MergeStats | None = None
    drawing: DrawingStats | None = None  # of an image engine
    merge_s: float = 0.0  # making the merged copy, before the step
    probe_s: float = 0.0  # probing adapters, before the step's own pass
    running: int = 0
    waiting: int = 0
    load_s: float = 0.0  # adapters onto the device
    mechanisms: dict[str, Mechanism] | None = None  # of the engine, told twice a second


@dataclass(slots=True)
class StepOutput:
    """The changes of one step. A request whose last item is in `items` is not in `changed`."""

    items: dict[str, list[StreamItem]] = field(default_factory=dict)  # by gateway id
    changed: list[RequestBrief] = field(default_factory=list)  # new, or in a new phase
    residency: list[ResidencyChange] = field(default_factory=list)
    loading: list[str] = field(default_factory=list)  # adapters whose copy has begun and that will be read
    readings: list[Reading] = field(default_factory=list)  # of adapters, one for each copy that has ended
    stats: StepStats = field(default_factory=StepStats)
    failure: Exception | None = None  # the forward pass failed as a whole; its requests got error items

    @property
    def empty(self) -> bool:
        """Whether nothing was computed and there is nothing to report."""
        ran = self.stats.decode_rows or self.stats.prefill_requests
        told = self.items or self.changed or self.residency or self.loading or self.readings
        return not (ran or told or self.failure)


@dataclass(slots=True)
class StepReport:
    """The event loop's report of one step, which began at `began_s`; its duration is in the statistics.

    `failures` counts consecutive failing steps, this one included. `prefixes`: as in `worker_events.Stepped`.
    """

    step: int
    began_s: float
    output: StepOutput
    failures: int
    kv_blocks_free: int
    adapter_bytes_free: int
    prefixes: Mapping[int, bool] | None = None
