"""A plug-in with a small one of everything that can be added to Motet (docs/extending.md).

    motet up --demo --plugins examples/plugin.py --policy last-by-name --adapter-eviction largest-first --engine echo
    curl --json '{"text": "hello there"}' localhost:8000/v1/echoes

A plug-in of your own may add one thing only, or be a package of several modules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from fastapi import APIRouter
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from motet.examples.demo import DEMO
from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.choice import Choice
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.dispatch import POLICIES
from motet.policies.memory.eviction import EVICTIONS, Ranked
from motet.policies.tenant_shares import Part
from motet.services.gateway.edge.app import ROUTES
from motet.services.gateway.edge.http import json_answer
from motet.services.gateway.edge.kinds import KINDS, Kind
from motet.services.gateway.edge.openapi import Description
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.openai.decoding import known
from motet.services.gateway.openai.prepare import Origin, Preparer
from motet.services.gateway.owner.made_by import Answer
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.stream import Job
from motet.services.gateway.tenants.auth import caller_of
from motet.services.registry.files import PeftFiles, Source
from motet.services.registry.paths import open_directory
from motet.services.registry.sources import SOURCES
from motet.services.registry.threads import in_thread
from motet.services.worker.config import ENGINES, WorkerConfig
from motet.services.worker.engines.opening import Facts, Opened, Wiring
from motet.services.worker.engines.request import EngineRequest, StepOutput, StepReport
from motet.shared.clock import now_s
from motet.shared.errors import InvalidAdapter, MotetError
from motet.shared.model import Capability, SamplingParams, WorkerLimits
from motet.shared.wire.request import pack_tokens, unpack_tokens
from motet.shared.wire.stream import StreamItem

# ---- a scheduling policy


def last_by_name(state: ClusterState, ask: Ask, fit: NDArray[np.bool_], now_s: float, avg_resp_len: float) -> Choice:
    """Of the workers that can take the request, the one whose id comes last."""
    return Choice(max(np.flatnonzero(fit).tolist(), key=state.ids.__getitem__))


POLICIES.add("last-by-name", lambda: last_by_name)


# ---- an eviction


@dataclass(eq=False)
class LargestFirst(Ranked):
    """The largest idle adapter is evicted first."""

    def values(self) -> dict[str, float]:
        return {digest: -float(self.sizes[digest]) for digest in self.idle}


EVICTIONS.add("largest-first", lambda cost: LargestFirst())


# ---- a source of adapters


class Samples(Source):
    """`sample:NAME`: an adapter of the demo."""

    async def fetch(self, location: str, *, chat: bool) -> PeftFiles:
        root = str(DEMO / "adapters")
        path = DEMO / "adapters" / location
        if path.parent != Path(root) or not path.is_dir():
            raise InvalidAdapter(f"there is no sample {location!r}", param="location")
        source = f"sample:{location}"
        return await in_thread(lambda: open_directory(str(path), [root], 1 << 30, source=source, chat=chat, layout=self.layout))


SOURCES.add("sample", lambda config, store: Samples())


# ---- an HTTP endpoint


class AdapterCount(msgspec.Struct, frozen=True):
    """The number of adapters that the caller may use."""

    adapters: int


def add_routes(api: APIRouter, gateway: Gateway, description: Description) -> None:
    """GET /v1/adapter-count."""

    @api.get("/v1/adapter-count", **description.of("Count the adapters.", AdapterCount))
    async def adapter_count(request: Request) -> Response:
        return json_answer(AdapterCount(len(gateway.adapters.visible(caller_of(request).tenant))))


ROUTES.append(add_routes)


# ---- a kind of requests


class EchoRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/echoes."""

    text: str
    model: str | None = None
    stream: ClassVar[bool] = False


class PreparedEcho(msgspec.Struct, frozen=True):
    """A request that is ready to run."""

    job: Job
    prompt_tokens: int


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    object: str = "echo"
    text: str
    usage: dict[str, int]


_decoder = msgspec.json.Decoder(EchoRequest)


def parse_echo(body: bytes) -> EchoRequest:
    """Raises BadRequest naming the field."""
    request: EchoRequest = known(body, _decoder, {})
    return request


async def prepare_echo(preparer: Preparer, request: EchoRequest, origin: Origin) -> PreparedEcho:
    """The request as a job of the mesh. Raises BadRequest, PromptTooLong, ModelNotFound or Overloaded."""
    adapter, present = preparer.adapter(request.model, origin.tenant), preparer.now()

    def prepared() -> PreparedEcho:
        tokens = present.checked(present.prompts.texts([request.text], add_special_tokens=True, param="text")[0], "text")
        job = Job(
            request_id=f"echo-{origin.drawn}",
            model=request.model or present.base_model,
            prompt=pack_tokens(tokens),
            sampling=SamplingParams(max_tokens=len(tokens), temperature=0.0),
            slo=present.objective(origin, len(tokens)),
            adapter=adapter,
            tenant=origin.tenant,
            tenant_weight=present.weight(origin.tenant),
            timeout_s=present.config.requests.request_timeout_s,
            arrived_s=origin.arrived_s,
        )
        return PreparedEcho(job, len(tokens))

    return await origin.run(prepared)


async def collect_echo(owner: Owner, prepared: PreparedEcho, held: Part) -> Answer:
    """The whole answer. Raises the MotetError that ended the request."""
    stream = await owner.open(prepared.job)
    text = "".join([delta.text async for delta in stream])
    made = len(stream.answered)
    usage = {"prompt_tokens": prepared.prompt_tokens, "completion_tokens": made}
    return Answer(Echo(text=text, usage=usage), owner.made_by(stream), made)


KINDS.append(
    Kind(
        path="/v1/echoes",
        summary="Say it again.",
        request=EchoRequest,
        answer=Echo,
        unserved={},
        parse=parse_echo,
        prepare=prepare_echo,
        collect=collect_echo,
    )
)


# ---- an engine


def open_echo(config: WorkerConfig, model_dir: Path, wiring: Wiring) -> Opened:
    """Opens the engine that answers every request with the request's own prompt."""
    limits = WorkerLimits(
        base_model=config.base.name,
        device="cpu",
        max_model_len=64,
        max_running=1,
        max_waiting=8,
        block_size=8,
        kv_blocks_total=EchoEngine.BLOCKS,
        adapter_bytes_total=0,
        max_lora_rank=0,
    )
    facts = Facts(limits=limits, vocab_size=1 << 20, eos_token_ids=frozenset(), parse_adapter=lambda path, digest: None)
    return Opened(EchoEngine(wiring), lambda: facts)


class EchoEngine:
    """An engine (`services.worker.engines.protocol.EngineProtocol`) without a model."""

    BLOCKS = 8
    kv = None
    serves: frozenset[Capability] = frozenset()

    def __init__(self, wiring: Wiring) -> None:
        self._deliver, self._step = wiring.deliver, 0

    async def start(self) -> None:
        """There is nothing to load."""

    def add(self, request: EngineRequest) -> None:
        """One step makes all tokens of the answer."""
        self._step += 1
        item = StreamItem(request.request_id, request.epoch, 0, unpack_tokens(request.prompt), "length")
        output = StepOutput(items={request.gateway_id: [item]})
        report = StepReport(self._step, now_s(), output, failures=0, kv_blocks_free=self.BLOCKS, adapter_bytes_free=0)
        asyncio.get_running_loop().call_soon(self._deliver, report)

    def cancel(self, request_id: str, epoch: int) -> None:
        """Its answer is on the way already."""

    def load_adapter(self, adapter: Any, over: Collection[str] | None = None) -> None:
        """It has no adapters."""

    def pin_adapters(self, digests: Collection[str]) -> None:
        """It has no adapters."""

    def unload_adapter(self, digest: str) -> None:
        """It has no adapters."""

    def reject_adapter(self, digest: str, error: MotetError) -> None:
        """It has no adapters."""

    def abort_all(self, error: MotetError) -> None:
        """No request is left behind."""

    def busy_s(self) -> float:
        """Seconds for which a step has been running."""
        return 0.0

    async def check(self) -> None:
        """It keeps no accounts."""

    async def stop(self) -> None:
        """There is nothing to release."""


ENGINES.add("echo", f"{__name__}:open_echo")
