"""/v1/scale: how many workers there should be, as the scheduler that plans last decided, for people, KEDA and HPA."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from motet.services.gateway.edge.http import PathName, json_answer
from motet.services.gateway.edge.openapi import Description
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.tenants.auth import caller_of
from motet.shared import subjects
from motet.shared.clock import unix_ms
from motet.shared.errors import NotFound, from_info
from motet.shared.wire.admin import StatusReply, StatusRequest
from motet.shared.wire.refusal import Refused
from motet.shared.wire.scale import Decision, Reason, Sized

TIMEOUT_S = 2.0
NOT_SIZED = "no number of workers is decided: wait for 15 s, or start schedulers without --scale off"


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One decision."""

    at_unix_ms: int
    desired: int
    current: int
    reason: Reason


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers a base model should have."""

    base_model: str
    desired: Annotated[int, Meta(description="Workers that there should be.")]
    current: Annotated[int, Meta(description="Workers that serve or start.")]
    starting: int
    needed: Annotated[int, Meta(description="Workers that the forecast and what waits need.")]
    reason: Reason
    why: Annotated[str, Meta(description="The reason as a sentence.")]
    limit: Annotated[
        str, Meta(description="What more load would exceed first: compute, seats, KV, adapter memory, TPOT, TTFT, ...")
    ]
    leaves: Annotated[str, Meta(description="The worker that should stop, if one should.")]
    overdue: Annotated[tuple[str, ...], Meta(description="Workers that have been starting for too long to count.")]
    missing: Annotated[tuple[str, ...], Meta(description="What cannot be known now, so that nothing changes.")]
    requests_s: Annotated[float, Meta(description="Requests per second now, the refused ones too.")]
    forecast_requests_s: Annotated[float, Meta(description="What to expect, at most, when a worker that starts now is ready.")]
    lead_s: Annotated[float, Meta(description="Seconds that a worker takes to start, as measured.")]
    scheduler_id: str
    age_s: Annotated[float, Meta(description="Seconds since the decision.")]
    decisions: Annotated[list[Decided], Meta(description="The last decisions, the oldest first; a scheduler keeps 200.")]


class Scales(msgspec.Struct, frozen=True, kw_only=True):
    """Of every base model."""

    scale: list[Scale]


def add_routes(api: APIRouter, gateway: Gateway, description: Description) -> None:
    """Add the routes."""
    of = description.of

    @api.get("/v1/scale", **of("How many workers every base model should have.", Scales, 404))
    async def scales(request: Request) -> Response:
        caller_of(request).check("admin", "numbers of workers")
        return json_answer(Scales(scale=[scale_of(decisions) for decisions in await _decisions(gateway)]))

    @api.get("/v1/scale/{name:path}", **of("How many workers one base model should have.", Scale, 404))
    async def scale(name: PathName, request: Request) -> Response:
        caller_of(request).check("admin", "numbers of workers")
        for decisions in await _decisions(gateway):
            if decisions[-1].base_model == name:
                return json_answer(scale_of(decisions))
        raise NotFound(f"no worker count is decided for {name!r}")


async def _decisions(gateway: Gateway) -> list[list[Sized]]:
    reply = await gateway.bus.request(subjects.SCHEDULER_STATUS, StatusRequest(scale=True), StatusReply, timeout_s=TIMEOUT_S)
    if isinstance(reply, Refused):
        raise from_info(reply.error)
    found = [decisions for decisions in reply.scale if decisions]
    if not found:
        raise NotFound(NOT_SIZED)
    return sorted(found, key=lambda decisions: decisions[-1].base_model)


def scale_of(decisions: list[Sized]) -> Scale:
    """What is told of the last of these decisions."""
    last = decisions[-1]
    decision = msgspec.structs.asdict(last.decision)
    del decision["at_s"], decision["impossible"]
    return Scale(
        **decision,
        why=why(last.decision),
        base_model=last.base_model,
        scheduler_id=last.scheduler_id,
        requests_s=last.requests_s,
        forecast_requests_s=last.forecast_requests_s,
        lead_s=last.lead_s,
        age_s=round(max(0.0, (unix_ms() - last.at_unix_ms) / 1000), 1),
        decisions=[
            Decided(
                at_unix_ms=one.at_unix_ms,
                desired=one.decision.desired,
                current=one.decision.current,
                reason=one.decision.reason,
            )
            for one in decisions
        ],
    )


def why(one: Decision) -> str:
    """The reason as a sentence."""
    limit = f"; {one.limit} would be exceeded first" if one.limit else ""
    fewest = f", and no fewer than {one.desired} are allowed" if one.desired > one.needed and not one.overdue else ""
    sentences: dict[Reason, str] = {
        "steady": f"{one.needed} are needed{limit}",
        "up": f"{one.needed} are needed{limit}{fewest}",
        "down": f"one less has been enough for long enough; {one.leaves} holds the fewest bytes of adapters",
        "settling": "fewer would do, but not for long enough yet, or another one starts or leaves",
        "doubt": f"nothing changes without {' and '.join(one.missing)}",
        "impossible": f"more workers do not help: {one.impossible}",
        "most": f"{one.needed} are needed, and no more than {one.desired} are allowed{limit}",
        "idle": "nobody has asked for long enough",
        "asleep": "nobody asks",
        "woken": "a request waits and no worker serves",
    }
    return sentences[one.reason]
