"""/v1/status: this gateway, and the workers as a scheduler sees them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from motet.policies.cluster.lost_workers import LostState
from motet.services.gateway.edge.adapters import ShownRefused
from motet.services.gateway.edge.parts import Gateway
from motet.shared import subjects
from motet.shared.clock import now_s
from motet.shared.errors import MotetError, from_info
from motet.shared.model import Mechanism
from motet.shared.wire.admin import DemandStatus, PlanStatus, StatusReply, StatusRequest, WorkerStatus
from motet.shared.wire.refusal import Refused

STATUS_TIMEOUT_S = 2.0
PLAN_TIMEOUT_S = 15.0  # a scheduler's first plan loads the solver


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """This gateway. `inflight`: its requests; `not_ready`: reasons why it cannot serve now. `asleep`: there is no worker, since
    nobody asks; the next request has one started. `parked`: requests that wait for a first worker."""

    id: str
    inflight: int
    not_ready: list[str]
    asleep: bool = False
    parked: int = 0


class Worker(WorkerStatus, kw_only=True):
    """A worker as a scheduler sees it. `age_ms` is the time since its last message; `stale`: too old to get requests.

    `waiting` counts requests that wait or load, including `in_flight`: assigned requests that the worker's state does not show
    yet. `merged`: digest of the adapter that is merged into its weights.
    """

    adapters_placed: Annotated[int, Meta(description="Adapters that a scheduler wants loaded on it.")]
    merged_name: Annotated[str, Meta(description="A name of the merged adapter.")]


class AbsentWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that does not serve."""

    worker_id: str
    state: LostState
    age_s: Annotated[float, Meta(description="Seconds since the last change.")]
    starts: Annotated[int, Meta(description="How often it has started since it last served.")]
    last_words: Annotated[str, Meta(description="Why it failed, as it said.")]
    summary: Annotated[str, Meta(description="All of this as a sentence.")]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """This gateway, and the workers as a scheduler sees them."""

    gateway: GatewayStatus
    base_model: str
    adapters: Annotated[int, Meta(description="Names of adapters.")]
    refused_adapters: ShownRefused
    scheduler_id: str | None = None
    workers: list[Worker] = []
    plans: Annotated[list[PlanStatus], Meta(description="With `plan=true`: which requests would move, by base model.")] = []
    rebalance: Annotated[Mechanism | None, Meta(description="Whether requests move between workers, and why.")] = None
    demand: Annotated[
        list[DemandStatus], Meta(description="What the whole mesh is asked for, by base model, over the last half minute.")
    ] = []
    absent_workers: Annotated[list[AbsentWorker], Meta(description="Workers that do not serve, and why.")]
    error: Annotated[str | None, Meta(description="Reason why no scheduler answered.")] = None


async def status_of(gateway: Gateway, *, plan: bool) -> Status:
    """The status. `plan`: and what the scheduler would move."""
    owner, now = gateway.owner, now_s()
    absent = [
        AbsentWorker(
            worker_id=one.worker_id,
            state=one.state,
            age_s=round(now - one.at_s, 1),
            starts=one.starts,
            last_words=one.words,
            summary=one.sentence(now),
        )
        for one in gateway.fleet.lost.all(now)
    ]
    seen: dict[str, Any] = {}
    try:
        timeout_s = PLAN_TIMEOUT_S if plan else STATUS_TIMEOUT_S
        reply = await gateway.bus.request(subjects.SCHEDULER_STATUS, StatusRequest(plan=plan), StatusReply, timeout_s=timeout_s)
        if isinstance(reply, Refused):
            raise from_info(reply.error)
        workers = [_worker(gateway, one) for one in reply.workers]
        told = {"plans": reply.plans, "rebalance": reply.rebalance, "demand": reply.demand}
        seen = {"scheduler_id": reply.scheduler_id, "workers": workers} | told
    except MotetError as error:
        seen = {"error": error.message}
    return Status(
        gateway=GatewayStatus(
            id=owner.gateway_id,
            inflight=owner.inflight,
            not_ready=gateway.not_ready(),
            asleep=gateway.fleet.asleep(),
            parked=owner.parked,
        ),
        base_model=gateway.config.base.name,
        adapters=gateway.adapters.names(),
        refused_adapters=gateway.adapters.refused,
        absent_workers=absent,
        **seen,
    )


def _worker(gateway: Gateway, seen: WorkerStatus) -> Worker:
    placed = len(gateway.placements.digests(seen.worker_id))
    return Worker(**msgspec.structs.asdict(seen), adapters_placed=placed, merged_name=_name_of(gateway, seen.merged))


def _name_of(gateway: Gateway, digest: str) -> str:
    """A name of the adapter with this digest, its owner's if it belongs to one; "" when it has none."""
    entries = (info.entry for info in gateway.adapters.all()) if digest else ()
    return next((entry.name for entry in entries if entry.digest == digest), "")
