"""The OpenAI-compatible HTTP routes."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as installed_version
from typing import Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from motet.services.gateway.config import MAX_BODY_BYTES
from motet.services.gateway.edge import adapters_api, front, homes_api, images_api, keys_api, scale_api
from motet.services.gateway.edge.guard import Guard
from motet.services.gateway.edge.http import (
    Entrance,
    PathName,
    install_error_handlers,
    json_answer,
    read_body,
    while_connected,
)
from motet.services.gateway.edge.kinds import KINDS, Kind
from motet.services.gateway.edge.models import Model, Models, adapter_card, base_card
from motet.services.gateway.edge.openapi import Description, exactly_one, with_unserved
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.edge.requests import Requests, parsed_in
from motet.services.gateway.edge.status import Status, status_of
from motet.services.gateway.openai import fields, tokenizing
from motet.services.gateway.openai.tokenizing import DetokenizeRequest, Text, TokenizeRequest, Tokens
from motet.services.gateway.openai.unknown_model import unknown_model
from motet.services.gateway.owner.made_by import HEADERS as MADE_BY_HEADERS
from motet.services.gateway.tenants.auth import caller_of
from motet.shared.chat_templates import ChatTemplate
from motet.shared.errors import Unauthorized
from motet.shared.service import Health, Ready, metrics_text
from motet.shared.service import health as service_health

REASONS_HIDDEN = "the reasons are shown to an API key with the role admin"
VERSION = installed_version("motet")
ROUTES: list[Callable[[APIRouter, Gateway, Description], None]] = [
    adapters_api.add_routes,
    images_api.add_routes,
    keys_api.add_routes,
    scale_api.add_routes,
    homes_api.add_routes,
]
"""What adds routes that ask for an API key, if keys are used. Plug-ins add theirs (docs/extending.md)."""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The version of Motet."""

    version: str


# in one piece: a list of routes
def build_app(gateway: Gateway) -> ASGIApp:
    """All routes of one gateway."""
    app = FastAPI(title="Motet", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    api = APIRouter(dependencies=[Depends(gateway.keys.admit)])
    install_error_handlers(app)
    config, requests = gateway.config, Requests(gateway)
    description = Description()
    of = description.of
    for kind in KINDS:
        _add_kind(api, requests, kind, description)

    @api.get("/v1/models", **of("The base model and all adapters.", Models))
    async def models(request: Request) -> Response:
        caller = caller_of(request)
        adapters = gateway.adapters.visible(caller.tenant)
        return json_answer(Models(data=[base_card(gateway), *(adapter_card(gateway, info) for info in adapters)]))

    @api.get("/v1/models/{name:path}", **of("One model.", Model, 404))
    async def model(name: PathName, request: Request) -> Response:
        caller = caller_of(request)
        if gateway.preparer.adapter(name, caller.tenant) is None:
            return json_answer(base_card(gateway))
        names = (name, name.removeprefix(config.base.name + ":"))
        info = next((info for one in names if (info := gateway.adapters.resolve(one, caller.tenant)) is not None), None)
        if info is None:
            raise unknown_model(name, gateway.adapters, caller.tenant, config.base.name, param="model")
        return json_answer(adapter_card(gateway, info))

    tokenizable = exactly_one("prompt", "messages") | with_unserved(fields.TOKENIZE)

    @api.post("/tokenize", **of("Tokens of a text.", Tokens, 404, 429, body=TokenizeRequest, body_schema=tokenizable))
    async def tokenize(request: Request) -> Response:
        raw, prompts, lane = await read_body(request, MAX_BODY_BYTES), gateway.prompts, gateway.lanes.counting
        gateway.preparer.check_kind(draws=False)
        asked, tenant = await parsed_in(lane, tokenizing.parse_tokenize, raw, request), request.state.tenant
        profile = gateway.preparer.profile(gateway.preparer.adapter(asked.model, tenant))
        tools = bool((asked.chat_template_kwargs or {}).get("tools"))
        template = gateway.preparer.template(profile, tenant, tools=tools) if asked.messages is not None else None
        rendered: str | None = None
        if template is not None and not isinstance(template, ChatTemplate):
            messages = await lane.run(lambda: tokenizing.countable(asked.messages or [], template), len(raw), tenant)
            rendered = await while_connected(request, template.render(messages, **tokenizing.how(asked)))

        def work() -> tuple[list[int], list[str | None] | None]:
            tokens = tokenizing.counted(prompts, asked, template, rendered, profile.whole)
            return tokens, prompts.names(tokens) if asked.return_token_strs else None

        size = max(len(raw), len(rendered or ""))
        tokens, names = await while_connected(request, lane.run(work, size, tenant))
        longest = gateway.preparer.max_model_len
        return json_answer(Tokens(count=len(tokens), max_model_len=longest, tokens=tokens, token_strs=names))

    @api.post("/detokenize", **of("Text of tokens.", Text, 404, 429, body=DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        raw, lane = await read_body(request, MAX_BODY_BYTES), gateway.lanes.counting
        gateway.preparer.check_kind(draws=False)
        asked = await parsed_in(lane, tokenizing.parse_detokenize, raw, request)
        gateway.preparer.adapter(asked.model, request.state.tenant)
        text = await lane.run(lambda: gateway.prompts.text(asked.tokens), len(raw), request.state.tenant)
        return json_answer(Text(prompt=text))

    seen = "This gateway, and workers as a scheduler sees them. With `plan=true` also which requests would move."

    @api.get("/v1/status", **of(seen, Status, 400))
    async def status(request: Request, plan: Literal["true", "false"] = "false") -> Response:
        caller_of(request).check("admin", "the status")
        return json_answer(await status_of(gateway, plan=plan == "true"))

    @app.get("/health", **of("Whether the process lives.", Health, open_to_all=True))
    async def health() -> Response:
        return json_answer(*service_health("gateway", gateway.failure()))

    @app.get("/ready", **of("Whether it can serve now.", Ready, unavailable=Ready, open_to_all=True))
    async def ready(request: Request) -> Response:
        reasons = gateway.not_ready()
        shown = reasons if not reasons or await _is_admin(gateway, request) else [REASONS_HIDDEN]
        return json_answer(Ready(ready=not reasons, reasons=shown), 503 if reasons else 200)

    @app.get("/metrics", **of("Metrics for Prometheus, for an admin key.", PlainTextResponse))
    async def metrics(request: Request) -> Response:
        (await gateway.keys.admit(request)).check("admin", "reading metrics")  # their labels name every tenant's adapters
        return Response(metrics_text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/version", **of("The version.", Version, open_to_all=True))
    async def version() -> Response:
        return json_answer(Version(version=VERSION))

    front.add_routes(app.router, gateway, VERSION, description)
    for add_routes in ROUTES:
        add_routes(api, gateway, description)
    app.router.routes.extend(api.routes)  # `include_router` would build each of them once more, at the first request
    keyless = not gateway.keys.required
    description.add_routes(app, config, keyless=keyless)

    origins = _words(config.http.allowed_origins)
    guard = Guard(keyless=keyless, bound_host=config.http.host, hosts=_words(config.http.allowed_hosts), origins=origins)
    if origins:
        shown = ["x-request-id", "retry-after", *MADE_BY_HEADERS]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=shown
        )
    return Entrance(app, guard)


def _add_kind(api: APIRouter, requests: Requests, kind: Kind, description: Description) -> None:
    described = description.of(
        kind.summary,
        kind.answer,
        *(404, 409, 422, 429, 504),
        body=kind.request,
        body_schema=with_unserved(kind.unserved),
        form=kind.form,
        chunk=kind.chunk,
        generates=True,
    )

    @api.post(kind.path, **described)
    async def generate(request: Request) -> Response:
        return await requests.run(kind, request)


async def _is_admin(gateway: Gateway, request: Request) -> bool:
    """Whether the request has a key with the role admin, or no keys are used."""
    try:
        return (await gateway.keys.admit(request)).may("admin")
    except Unauthorized:
        return False


def _words(listed: str) -> list[str]:
    return [word.strip() for word in listed.split(",") if word.strip()]
