"""The OpenAI-compatible HTTP routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version as installed_version
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from motet.services.gateway.config import MAX_BODY_BYTES
from motet.services.gateway.edge import adapters_api, front, keys_api, openapi
from motet.services.gateway.edge.adapters_api import created_unix_ms, public_source, shown_source
from motet.services.gateway.edge.guard import Guard
from motet.services.gateway.edge.http import Entrance, install_error_handlers, json_answer, read_body, while_connected
from motet.services.gateway.edge.kinds import KINDS, Kind
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.edge.requests import Requests, parsed_in
from motet.services.gateway.openai import conversation, protocol
from motet.services.gateway.openai.prompt import Prompts
from motet.services.gateway.openai.unknown_model import unknown_model
from motet.services.gateway.owner.lost_workers import LostWorker
from motet.services.gateway.owner.made_by import HEADERS as MADE_BY_HEADERS
from motet.services.gateway.tenants.auth import caller_of
from motet.shared import subjects
from motet.shared.chat_templates import ChatTemplate
from motet.shared.clock import now_s
from motet.shared.errors import BadRequest, MotetError, Unauthorized, from_info
from motet.shared.service import health as service_health
from motet.shared.service import metrics_text
from motet.shared.wire.admin import StatusReply, StatusRequest
from motet.shared.wire.refusal import Refused
from motet.shared.wire.registry import AdapterInfo

STATUS_TIMEOUT_S = 2.0
PLAN_TIMEOUT_S = 15.0  # a scheduler's first plan loads the solver
REASONS_HIDDEN = "the reasons are shown to an API key with the role admin"
VERSION = installed_version("motet")
ROUTES: list[Callable[[APIRouter, Gateway], None]] = [adapters_api.add_routes, keys_api.add_routes]
"""What adds routes that ask for an API key, if keys are used. Plug-ins add theirs (docs/extending.md)."""


# in one piece: a list of routes
def build_app(gateway: Gateway) -> ASGIApp:
    """All routes of one gateway."""
    app = FastAPI(title="Motet", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    api = APIRouter(dependencies=[Depends(gateway.keys.admit)])
    install_error_handlers(app, api)
    config, requests = gateway.config, Requests(gateway)
    for kind in KINDS:
        _add_kind(api, requests, kind)

    @api.get("/v1/models")
    async def models(request: Request) -> Response:
        caller = caller_of(request)
        adapters = gateway.adapters.visible(caller.tenant)
        cards = [_base_card(gateway), *(_adapter_card(gateway, info) for info in adapters)]
        return json_answer({"object": "list", "data": cards})

    @api.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        caller = caller_of(request)
        if gateway.preparer.adapter(name, caller.tenant) is None:
            return json_answer(_base_card(gateway))
        names = (name, name.removeprefix(config.base.name + ":"))
        info = next((info for one in names if (info := gateway.adapters.resolve(one, caller.tenant)) is not None), None)
        if info is None:
            raise unknown_model(name, gateway.adapters, caller.tenant, config.base.name, param="model")
        return json_answer(_adapter_card(gateway, info))

    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        raw, prompts, lane = await read_body(request, MAX_BODY_BYTES), gateway.prompts, gateway.lanes.counting
        asked, tenant = await parsed_in(lane, protocol.parse_tokenize, raw, request), request.state.tenant
        profile = gateway.preparer.profile(gateway.preparer.adapter(asked.model, tenant))
        tools = bool((asked.chat_template_kwargs or {}).get("tools"))
        template = gateway.preparer.template(profile, tenant, tools=tools) if asked.messages is not None else None
        rendered: str | None = None
        if template is not None and not isinstance(template, ChatTemplate):
            messages = await lane.run(lambda: _countable(asked.messages or [], template), len(raw), tenant)
            rendered = await while_connected(request, template.render(messages, **_how(asked)))

        def work() -> tuple[list[int], list[str | None] | None]:
            tokens = _counted(prompts, asked, template, rendered, profile.whole)
            return tokens, prompts.names(tokens) if asked.return_token_strs else None

        size = max(len(raw), len(rendered or ""))
        tokens, names = await while_connected(request, lane.run(work, size, tenant))
        body = {"count": len(tokens), "max_model_len": gateway.preparer.max_model_len, "tokens": tokens, "token_strs": names}
        return json_answer(body)

    @api.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        raw, lane = await read_body(request, MAX_BODY_BYTES), gateway.lanes.counting
        asked = await parsed_in(lane, protocol.parse_detokenize, raw, request)
        gateway.preparer.adapter(asked.model, request.state.tenant)
        text = await lane.run(lambda: gateway.prompts.text(asked.tokens), len(raw), request.state.tenant)
        return json_answer({"prompt": text})

    @api.get("/v1/status")
    async def status(request: Request, plan: Literal["true", "false"] = "false") -> Response:
        caller_of(request).check("admin", "the status")
        return json_answer(await _status(gateway, plan=plan == "true"))

    @app.get("/health")
    async def health() -> Response:
        return json_answer(*service_health("gateway", gateway.failure()))

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        reasons = gateway.not_ready()
        shown = reasons if not reasons or await _is_admin(gateway, request) else [REASONS_HIDDEN]
        return json_answer({"ready": not reasons, "reasons": shown}, 503 if reasons else 200)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        (await gateway.keys.admit(request)).check("admin", "reading metrics")  # their labels name every tenant's adapters
        return Response(metrics_text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/version")
    async def version() -> Response:
        return json_answer({"version": VERSION})

    front.add_routes(app.router, gateway, VERSION)
    openapi.add_routes(app.router, config, VERSION, keyless=not gateway.keys.required)
    for add_routes in ROUTES:
        add_routes(api, gateway)
    app.include_router(api)

    origins = _words(config.http.allowed_origins)
    keyless = not gateway.keys.required
    guard = Guard(keyless=keyless, bound_host=config.http.host, hosts=_words(config.http.allowed_hosts), origins=origins)
    if origins:
        shown = ["x-request-id", "retry-after", *MADE_BY_HEADERS]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=shown
        )
    return Entrance(app, guard)


def _add_kind(api: APIRouter, requests: Requests, kind: Kind) -> None:
    @api.post(kind.path)
    async def generate(request: Request) -> Response:
        return await requests.run(kind, request)


def _how(asked: protocol.TokenizeRequest) -> dict[str, Any]:
    """How the messages of a /tokenize request are rendered."""
    continued = asked.continue_final_message
    return {
        "add_generation_prompt": asked.add_generation_prompt and not continued,
        "continue_final_message": continued,
        "variables": asked.chat_template_kwargs,
    }


def _countable(messages: list[dict[str, Any]], template: Any) -> list[dict[str, Any]]:
    """The messages as the template reads them. Only an engine knows how many tokens images are, so they are refused."""
    if images := conversation.take_images(messages):
        raise BadRequest(f"{images[0].param}: images are not counted", param=images[0].param)
    return conversation.read_by(messages, template)


def _counted(
    prompts: Prompts, asked: protocol.TokenizeRequest, template: Any, rendered: str | None, whole: Mapping[str, int]
) -> list[int]:
    """The tokens of a /tokenize request."""
    special = asked.add_special_tokens
    if asked.messages is None:
        return prompts.texts([asked.prompt or ""], add_special_tokens=special is not False, counting=True)[0]
    if rendered is None:
        rendered = template.render(_countable(asked.messages, template), **_how(asked))
    return prompts.rendered(rendered, add_special_tokens=bool(special), whole=whole, counting=True)


async def _is_admin(gateway: Gateway, request: Request) -> bool:
    """Whether the request has a key with the role admin, or no keys are used."""
    try:
        return (await gateway.keys.admit(request)).may("admin")
    except Unauthorized:
        return False


def _words(listed: str) -> list[str]:
    return [word.strip() for word in listed.split(",") if word.strip()]


def _base_card(gateway: Gateway) -> dict[str, Any]:
    name = gateway.config.base.name
    root = public_source(f"path:{gateway.config.base.model}").removeprefix("path:")
    return _card(name, gateway.started_s, root, None, gateway.preparer.max_model_len)


def _adapter_card(gateway: Gateway, info: AdapterInfo) -> dict[str, Any]:
    created_s = created_unix_ms(info) // 1000
    root = shown_source(info).split(":", 1)[-1]  # without what kind of source it was
    return _card(info.entry.name, created_s, root, gateway.config.base.name, None)


def _card(name: str, created_s: int, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    """A model card with the fields vLLM gives it."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "motet",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


def _absent(absent: LostWorker) -> dict[str, Any]:
    now = now_s()
    return {
        "worker_id": absent.worker_id,
        "state": absent.state,
        "age_s": round(now - absent.at_s, 1),
        "starts": absent.starts,
        "last_words": absent.words,
        "summary": absent.sentence(now),
    }


def _name_of(gateway: Gateway, digest: str) -> str:
    """A name of the adapter with this digest, its owner's if it belongs to one; "" when it has none."""
    entries = (info.entry for info in gateway.adapters.all()) if digest else ()
    return next((entry.name for entry in entries if entry.digest == digest), "")


async def _status(gateway: Gateway, *, plan: bool) -> dict[str, Any]:
    """This gateway, and the workers as a scheduler sees them. `plan`: and what the scheduler would move."""
    owner = gateway.owner
    body: dict[str, Any] = {
        "gateway": {"id": owner.gateway_id, "inflight": owner.inflight, "not_ready": gateway.not_ready()},
        "base_model": gateway.config.base.name,
        "adapters": gateway.adapters.names(),
        "refused_adapters": adapters_api.refused_list(gateway),
        "scheduler_id": None,
        "workers": [],
        "plans": [],
        "absent_workers": [_absent(absent) for absent in gateway.fleet.lost.all(now_s())],
        "error": None,
    }
    try:
        timeout_s = PLAN_TIMEOUT_S if plan else STATUS_TIMEOUT_S
        reply = await gateway.bus.request(subjects.SCHEDULER_STATUS, StatusRequest(plan=plan), StatusReply, timeout_s=timeout_s)
        if isinstance(reply, Refused):
            raise from_info(reply.error)
    except MotetError as error:
        return body | {"error": error.message}
    workers, plans = msgspec.to_builtins(reply.workers), msgspec.to_builtins(reply.plans)
    for worker in workers:
        worker["adapters_placed"] = len(gateway.placements.digests(worker["worker_id"]))
        worker["merged_name"] = _name_of(gateway, worker["merged"])
    return body | {"scheduler_id": reply.scheduler_id, "workers": workers, "plans": plans}
