"""/v1/homes: the adapters that are at home on each worker, and the way in for a plan of `motet plan`.

A plan is answered when this gateway sees its homes placed, at most `SETTLE_S` later.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from motet.services.gateway.config import ADMIN_BODY_BYTES
from motet.services.gateway.edge.http import json_answer, read_body
from motet.services.gateway.edge.openapi import Description
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.openai.decoding import decode
from motet.services.gateway.openai.unknown_model import refusal
from motet.services.gateway.tenants.auth import caller_of
from motet.shared import subjects
from motet.shared.errors import AdapterNotFound, BadRequest, Conflict, Unavailable
from motet.shared.tenancy import SHARED
from motet.shared.wire.homes import ADAPTERS_MAX, WORKERS_MAX, PlannedAdapter, SetHomes

SETTLE_S = 5.0
OwnerOf = Annotated[str | None, Query(description="Names mean this tenant's adapters first; by default shared ones only.")]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class HomesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/homes."""

    workers: Annotated[
        list[Annotated[list[_Name], Meta(max_length=ADAPTERS_MAX)]],
        Meta(
            min_length=1,
            max_length=WORKERS_MAX,
            description="the names of the adapters of each worker of a plan, the most important first; which live worker gets"
            " which is decided by what it has loaded",
        ),
    ]


class Homes(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters at home on each worker of the base model: names, or digests of versions that have none any more."""

    base_model: str
    homes: dict[str, list[str]]


_homes = msgspec.json.Decoder(HomesRequest)


def add_routes(api: APIRouter, gateway: Gateway, description: Description) -> None:
    """Add the routes."""
    of = description.of

    @api.get("/v1/homes", **of("The adapters that are at home on each worker.", Homes))
    async def homes(request: Request) -> Response:
        caller_of(request).check("admin", "homes of adapters")
        return json_answer(_told(gateway))

    @api.post("/v1/homes", **of("Give live workers the adapters of a plan.", Homes, 404, 409, 503, body=HomesRequest))
    async def set_homes(request: Request, tenant: OwnerOf = None) -> Response:
        caller_of(request).check("admin", "homes of adapters")
        asked: HomesRequest = decode(await read_body(request, ADMIN_BODY_BYTES), _homes)
        planned = _planned(gateway, asked, tenant or SHARED)
        serving = len(gateway.fleet.workers())
        if len(planned) > serving:
            raise Conflict(
                f"workers: the plan has {len(planned)} and {serving} serve; start as many as the plan has first",
                param="workers",
            )
        await gateway.bus.publish(subjects.HOMES, SetHomes(base_model=gateway.config.base.name, workers=planned))
        wanted = sorted(sorted(adapter.digest for adapter in worker) for worker in planned if worker)
        if not await gateway.settled(lambda: _placed(gateway) == wanted, SETTLE_S):
            raise Unavailable("no scheduler has placed the plan: one with --placement on is needed", retry_after_s=SETTLE_S)
        return json_answer(_told(gateway))


def _planned(gateway: Gateway, asked: HomesRequest, tenant: str) -> list[list[PlannedAdapter]]:
    """The adapters of each worker. Raises AdapterNotFound for an unknown name, BadRequest for too many or one that repeats."""
    if sum(map(len, asked.workers)) > ADAPTERS_MAX:
        raise BadRequest(f"workers: they have more than {ADAPTERS_MAX} adapters together", param="workers")
    found = []
    for number, names in enumerate(asked.workers):
        where, worker = f"workers[{number}]", dict[str, PlannedAdapter]()
        for name in names:
            info = gateway.adapters.resolve(name, tenant)
            if info is None:
                raise AdapterNotFound(f"{where}: there is no adapter {name!r}.{refusal(name, gateway.adapters)}", param=where)
            digest = info.entry.digest
            if digest in worker:
                raise BadRequest(f"{where}: {name!r} is there twice", param=where)
            worker[digest] = PlannedAdapter(digest, info.version.rank, info.version.size_bytes)
        found.append([*worker.values()])
    return found


def _placed(gateway: Gateway) -> list[list[str]]:
    return sorted(sorted(digests) for digests in _digests(gateway).values() if digests)


def _digests(gateway: Gateway) -> dict[str, tuple[str, ...]]:
    """By worker of this gateway's base model: the adapters at home there."""
    return {known.worker_id: gateway.placements.digests(known.worker_id) for known in gateway.fleet.workers()}


def _told(gateway: Gateway) -> Homes:
    names = {info.entry.digest: info.entry.name for info in gateway.adapters.all()}
    homes = {worker: [names.get(digest, digest) for digest in digests] for worker, digests in sorted(_digests(gateway).items())}
    return Homes(base_model=gateway.config.base.name, homes=homes)
