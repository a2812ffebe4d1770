"""A generating request over HTTP: admit, parse, prepare, run; the same steps for every kind (`kinds`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import Response

from motet.policies.tenant_shares import Part
from motet.services.gateway.edge import idempotency
from motet.services.gateway.edge.http import is_form, read_body, while_connected
from motet.services.gateway.edge.kinds import Kind
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.openai import body_shape
from motet.services.gateway.openai.images import FILES_PATH
from motet.services.gateway.openai.lanes import INLINE_BYTES, Lane
from motet.services.gateway.openai.prepare import Origin
from motet.services.gateway.owner.encoding import PartsResponse, encoded
from motet.services.gateway.owner.made_by import MadeBy
from motet.services.gateway.tenants.limits import Turn, UntilSent
from motet.shared.model import Slo

SLO_HEADERS = {
    "class": "x-slo-class",
    "ttft_ms": "x-slo-ttft-ms",
    "tpot_ms": "x-slo-tpot-ms",
    "e2e_ms": "x-slo-e2e-ms",
}

PROGRESS = "x-motet-progress"


class Requests:
    """Runs the generating requests of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def run(self, kind: Kind, request: Request) -> Response:
        """The answer to a request. Raises the MotetError that it ends with."""
        self._gateway.admit()
        turn = self._gateway.limits.begin(request.state.tenant)
        try:
            return await self._answer(kind, request, turn)
        except BaseException:
            turn.fail()
            raise

    async def _answer(self, kind: Kind, request: Request, turn: Turn) -> Response:
        gateway = self._gateway
        form = kind.parse_form is not None and is_form(request)
        raw = await read_body(request, kind.body_bytes_max(gateway.config), form=form)
        gateway.preparer.check_kind(kind.draws)
        parse = _form_parser(kind, request) if form else kind.parse
        parsed = await parsed_in(gateway.lanes.requests, parse, raw, request, form=form)
        slo = gateway.preparer.slo(_slo_headers(request), names=SLO_HEADERS)  # also of a repeated request
        asked = _Asked(kind, request, parsed, slo, len(raw), turn)
        digest = _digest(raw, request) if idempotency.HEADER in request.headers else None
        del raw  # the answer may take minutes
        if parsed.stream:
            return await self._stream(asked, digest)
        if digest is None:
            parts, made_by, held = await while_connected(request, self._whole(asked, turn))
            return UntilSent(PartsResponse(parts, turn.headers() | made_by.headers), held.release)

        async def once() -> idempotency.Answered:
            parts, made_by, held = await self._whole(asked, turn.hand_over())
            held.release()
            return idempotency.Answered(b"".join(parts), made_by.headers)

        answered, again = await while_connected(request, gateway.once.whole(request, digest, once))
        turn.end()
        replayed = {"idempotent-replayed": "true"} if again else {}
        return PartsResponse([answered.body], turn.headers() | answered.headers | replayed)

    async def _prepared(self, asked: _Asked, turn: Turn) -> Any:
        kind, request, state = asked.kind, asked.request, asked.request.state
        origin = Origin(
            tenant=state.tenant,
            slo=asked.slo,
            named=state.given_id,
            drawn=state.drawn_id,
            lane=self._gateway.lanes.requests,
            size=asked.size,
            files_url=f"{request.base_url}{FILES_PATH.lstrip('/')}" if kind.draws else "",
            progress=kind.draws and request.headers.get(PROGRESS) == "1",
        )
        ready = await kind.prepare(self._gateway.preparer, asked.parsed, origin)
        state.body.release()
        turn.spend(ready.prompt_tokens)
        return ready

    async def _whole(self, asked: _Asked, turn: Turn) -> tuple[list[bytes], MadeBy, Part]:
        """The answer in parts, what made it, and its share of what all answers may have, to be released when it is sent."""
        owner = self._gateway.owner
        held = Part(owner.answers, asked.request.state.tenant)
        try:
            answer = await asked.kind.collect(owner, await self._prepared(asked, turn), held)
            parts = await encoded(answer.body, held)
        except BaseException:
            turn.fail()
            held.release()
            raise
        turn.end(answer.completion_tokens)
        return parts, answer.made_by, held

    async def _stream(self, asked: _Asked, digest: bytes | None) -> Response:
        forget = self._gateway.once.stream(asked.request, digest) if digest is not None else None
        try:
            ready = await self._prepared(asked, asked.turn)
            assert asked.kind.stream is not None, "only such requests ask for a stream"
            streamed = await while_connected(asked.request, asked.kind.stream(self._gateway.owner, ready))
        except BaseException:
            if forget is not None:
                forget()
            raise
        streamed.response.headers.update(asked.turn.headers())

        def over() -> None:
            if streamed.served():
                asked.turn.end(streamed.output_tokens())
                return
            asked.turn.fail()  # it waited in vain for a first worker
            if forget is not None:
                forget()

        return UntilSent(streamed.response, over)


class _Asked:
    """A request that was parsed."""

    __slots__ = ("kind", "parsed", "request", "size", "slo", "turn")

    def __init__(self, kind: Kind, request: Request, parsed: Any, slo: Slo, size: int, turn: Turn) -> None:
        self.kind, self.request, self.parsed = kind, request, parsed
        self.slo, self.size, self.turn = slo, size, turn


async def parsed_in(lane: Lane, parse: Callable[[bytes], Any], raw: bytes, request: Request, *, form: bool = False) -> Any:
    """The request in a body (JSON, or a `form`), parsed in a thread of `lane` if that may take long.

    Raises BadRequest or Overloaded.
    """

    def work() -> Any:
        if not form:
            body_shape.check(raw)
        return parse(raw)

    if len(raw) <= INLINE_BYTES:
        return work()
    return await while_connected(request, lane.run(work, len(raw), request.state.tenant))


def _form_parser(kind: Kind, request: Request) -> Callable[[bytes], Any]:
    """What parses the body of a request that is a form."""
    parse_form, content_type = kind.parse_form, request.headers["content-type"]
    assert parse_form is not None, "only such requests may be forms"
    return lambda raw: parse_form(raw, content_type)


def _digest(raw: bytes, request: Request) -> bytes:
    """Of a body: equal where it is sent again. A client that sends a form again draws another boundary."""
    if is_form(request):
        _, options = parse_options_header(request.headers["content-type"])
        raw = raw.replace(options.get(b"boundary") or b"--", b"")
    return hashlib.sha256(raw).digest()


def _slo_headers(request: Request) -> dict[str, str]:
    headers = request.headers
    return {key: headers[name] for key, name in SLO_HEADERS.items() if name in headers}
