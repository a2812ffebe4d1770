"""The types of the engine's input, requests, and of its output, one report per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from motet.policies.step.cold_start import AssistRates
from motet.policies.times.step_record import Step
from motet.shared.model import EmbeddingParams, RequestBrief, SamplingParams, Slo, Tier
from motet.shared.wire.request import Image, KvOffer
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


@dataclass(kw_only=True, slots=True)
class EngineRequest:
    """One sequence to generate. `output` holds the tokens of earlier epochs: the first new token has index len(output)."""

    request_id: str
    gateway_id: str
    prompt: list[int]
    sampling: SamplingParams
    arrival_s: float  # shared.clock.now_s at the worker
    epoch: int = 0
    output: list[int] = field(default_factory=list)
    slo: Slo = field(default_factory=Slo)
    adapter: HostAdapter | None = None
    predicted_tokens: int = 0
    priority: int = 0  # of those waiting, smaller ones go first; of those running, larger ones are preempted first
    cache_scope: bytes = b""  # the tenants that may share its KV blocks (policies.memory.kv_blocks.cache_scope)
    tenant: str = ""
    tenant_weight: float = 1.0
    kv: KvOffer | None = None  # from where it has moved
    kv_wait_s: float = 0.0  # the longest time to wait for KV blocks from there; 0: they are computed
    losses: int = 0  # workers lost with it in a row, without a new token
    embedding: EmbeddingParams | None = None  # the request asks for the prompt's embedding instead of tokens
    images: list[Image] = field(default_factory=list)  # the prompt has the model's placeholder for each

    def brief(self, adapter_digest: str, rank: int, output_tokens: int, *, running: bool) -> RequestBrief:
        """The facts of the request that a scheduler needs. `output_tokens`: so far; `running`: it is in a batch."""
        return RequestBrief(
            request_id=self.request_id,
            epoch=self.epoch,
            adapter_digest=adapter_digest,
            rank=rank,
            prompt_tokens=len(self.prompt),
            output_tokens=output_tokens,
            predicted_tokens=self.predicted_tokens,
            phase="running" if running else "waiting",
            tpot_slo_ms=self.slo.tpot_slo_ms,
            ttft_slo_ms=self.slo.ttft_slo_ms,
            tenant=self.tenant,
            tenant_weight=self.tenant_weight,
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


class StepStats(Step, kw_only=True):
    """The step record of a live engine: what step times depend on, and facts for metrics and requests."""

    cached_tokens: int = 0  # tokens that admissions found in the prefix cache
    preempted: int = 0
    adapters_loaded: int = 0  # whole since the last step
    cold_starts: list[tuple[str, str]] = []  # mode and reason of those that joined while or after
    cold_errors_ms: list[tuple[str, float]] = []  # mode, time to first token beyond the predicted one
    copies: CopyStats | None = None
    merging: MergeStats | None = None
    merge_s: float = 0.0  # making the merged copy, before the step
    running: int = 0
    waiting: int = 0
    load_s: float = 0.0  # adapters onto the device


@dataclass(slots=True)
class StepOutput:
    """The changes of one step. A request whose last item is in `items` is not in `changed`."""

    items: dict[str, list[StreamItem]] = field(default_factory=dict)  # by gateway id
    changed: list[RequestBrief] = field(default_factory=list)  # new, or in a new phase
    residency: list[ResidencyChange] = field(default_factory=list)
    stats: StepStats = field(default_factory=StepStats)
    failure: Exception | None = None  # the forward pass failed as a whole; its requests got error items

    @property
    def empty(self) -> bool:
        """Whether nothing was computed and there is nothing to report."""
        ran = self.stats.decode_rows or self.stats.prefill_requests
        return not (ran or self.items or self.changed or self.residency or self.failure)
