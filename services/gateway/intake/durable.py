"""A delivered durable request: its ids, its deadline, and the result or dead letter that is stored at its end.

This file does no IO; `services.gateway.intake.intake` does.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec

from motet.policies.tenant_shares import Part
from motet.services.gateway.openai import body_shape, image_requests, protocol
from motet.services.gateway.openai.decoding import KEYS, decode
from motet.services.gateway.openai.image_requests import ImageEdit, ImageRequest
from motet.services.gateway.openai.prepare import SLO_FIELDS
from motet.services.gateway.openai.texts import Prepared
from motet.services.gateway.owner.encoding import LESS, encoded
from motet.services.gateway.owner.made_by import Answer
from motet.shared import subjects
from motet.shared.clock import now_s, unix_ms
from motet.shared.errors import AnswerTooLarge, BadRequest, DeadlineExceeded, MotetError, TooLarge
from motet.shared.streams import Delivery
from motet.shared.tenancy import DEFAULT_TENANT, TENANT

TIMEOUT_MAX_MS = 30 * 86_400_000
FIELD_BYTES_MAX = 4096  # of request_id, timeout_ms, slo, stream and kind
DEAD_BODY_MAX = 256 * 1024  # bytes of the original that a dead letter keeps
CHAT_TOKEN_BYTES = 37  # the shortest token with its log-probability: {"token":"","logprob":0.0,"bytes":[]}
TEXT_TOKEN_BYTES = 9  # the same of a text completion: "", 0.0, 0,
_WORD = re.compile(r"[A-Za-z0-9_-]{1,128}")

Asked = protocol.ChatRequest | protocol.CompletionRequest | ImageRequest | ImageEdit
Parsed = tuple[Asked, dict[str, Any], bool]


class DurableRequest:
    """One delivery. `read` takes ids and deadline from the body, and `parse` checks it; both may take long."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.tenant = delivery.subject.rsplit(".", 1)[-1]
        message_id = delivery.headers.get("Nats-Msg-Id", "")
        self.request_id = message_id if _WORD.fullmatch(message_id) else f"seq-{delivery.sequence}"
        self.timeout_ms: int | None = None
        self._ends_s: float | None = None
        self._fields: dict[str, msgspec.Raw] = {}
        self._problem: MotetError | None = None

    def read(self, bytes_max: int) -> None:
        """Read id and deadline from the body, and remember the first error in it."""
        if not TENANT.fullmatch(self.tenant):
            self._problem = BadRequest(f"tenant {self.tenant!r}: letters, digits, '_' and '-' only, at most 64")
        if len(self.delivery.data) > bytes_max:
            self._problem = TooLarge(f"the request has {len(self.delivery.data)} bytes, the limit is {bytes_max}")
            return
        try:
            body_shape.check(self.delivery.data)
            self._fields = decode(self.delivery.data, KEYS)
        except BadRequest as error:
            self._problem = self._problem or error
            return
        given = _value(self._fields.pop("request_id", None))
        if isinstance(given, str) and _WORD.fullmatch(given):
            self.request_id = given
        elif given is not None:
            reason = "request_id: letters, digits, '_' and '-' only, at most 128"
            self._problem = self._problem or BadRequest(reason, param="request_id")
        timeout_ms = _value(self._fields.pop("timeout_ms", None))
        if isinstance(timeout_ms, int) and not isinstance(timeout_ms, bool) and 1 <= timeout_ms <= TIMEOUT_MAX_MS:
            self.timeout_ms = timeout_ms
            age_ms = max(0, unix_ms() - self.delivery.published_unix_ms)
            self._ends_s = now_s() + (timeout_ms - age_ms) / 1000
        elif timeout_ms is not None:
            reason = f"timeout_ms: expected whole milliseconds from 1 to {TIMEOUT_MAX_MS}"
            self._problem = self._problem or BadRequest(reason, param="timeout_ms")

    @property
    def key(self) -> str:
        """The key of this request in KV `motet_intake`."""
        return f"{self.delivery.stream}.{self.delivery.sequence}"

    @property
    def addressable(self) -> bool:
        """Whether a result can be stored: the subject must belong to a tenant."""
        return TENANT.fullmatch(self.tenant) is not None

    @property
    def result_subject(self) -> str:
        return subjects.results(self.tenant, self.request_id)

    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._ends_s is None else self._ends_s - now_s()

    def check_time(self, refusal: MotetError | None = None) -> None:
        """Raises DeadlineExceeded after the deadline. `refusal`: why the request still waits, for the message."""
        left_s = self.left_s()
        if left_s is not None and left_s <= 0:
            why = f"; the last refusal was: {refusal.message}" if refusal else ""
            raise DeadlineExceeded(f"timeout_ms: no answer within {self.timeout_ms} ms of publishing{why}")

    def parse(self) -> Parsed:
        """(request, slo, wants live tokens). Raises BadRequest naming the field, or TooLarge."""
        if self._problem is not None:
            raise self._problem
        fields = dict(self._fields)
        slo = _value(fields.pop("slo", None)) or {}
        if not isinstance(slo, dict):
            raise BadRequest("slo: an object is expected", param="slo")
        if unknown := next((name for name in slo if name not in SLO_FIELDS), None):
            raise BadRequest(f"slo.{unknown}: there is no such field", param=f"slo.{unknown}")
        live = _value(fields.pop("stream", None), False)
        if not isinstance(live, bool):
            raise BadRequest("stream: true or false is expected", param="stream")
        return _asked(fields, live), {"class": "batch"} | slo, live

    async def ok(self, answer: Answer, held: Part, bytes_max: int) -> bytes:
        """The result that holds OpenAI's response body, and what made it.

        Raises AnswerTooLarge, or Overloaded (`owner.encoding.hold`).
        """
        by = answer.made_by
        made = {"adapter": by.adapter or None, "base": by.base, "engine": by.engine}
        result = {"request_id": self.request_id, "status": "ok", "made_by": made, "response": answer.body}
        return b"".join(await encoded(result, held, bytes_max))

    def failed(self, error: MotetError) -> bytes:
        """The result of a request without an answer, with the reason."""
        return msgspec.json.encode({"request_id": self.request_id, "status": "error", "error": error.openai().error})

    def dead_letter(self, error: MotetError) -> tuple[str, bytes, dict[str, str]]:
        """(subject, payload, headers): the original with the reason. A long original is cut, and the headers say so."""
        data = self.delivery.data
        headers = {
            "Motet-Reason": " ".join(error.message.split())[:1000],
            "Motet-Code": error.code,
            "Motet-Subject": self.delivery.subject[:256],
            "Motet-Sequence": str(self.delivery.sequence),
            "Motet-Size": str(len(data)),
            "Motet-Sha256": hashlib.sha256(data).hexdigest(),
            "Nats-Msg-Id": f"dead.{self.key}",
        }
        if len(data) > DEAD_BODY_MAX:
            headers["Motet-Truncated"] = "true"
        return subjects.dead(self.tenant if self.addressable else DEFAULT_TENANT), data[:DEAD_BODY_MAX], headers


def _asked(fields: dict[str, msgspec.Raw], live: bool) -> Asked:
    """The body without the fields that only durable requests have. Raises BadRequest naming the field."""
    kind = _value(fields.pop("kind", None))
    if kind in (None, "text"):
        return protocol.parse(msgspec.json.encode(fields))
    if kind != "image":
        raise BadRequest(f"kind: expected text or image, got {kind!r:.40}", param="kind")
    if live:
        raise BadRequest("stream: pictures are not streamed here", param="stream")
    if _value(fields.get("response_format")) is not None:
        raise BadRequest("response_format: a result names stored pictures", param="response_format")
    parse = image_requests.parse_edit if "image" in fields else image_requests.parse
    return parse(msgspec.json.encode(fields))


def _value(raw: msgspec.Raw | None, default: Any = None) -> Any:
    """A field's value. Raises nothing for a long one: no field that is read here is long, so it is wrong anyway."""
    if raw is None:
        return default
    text = bytes(raw)
    return msgspec.json.decode(text) if len(text) <= FIELD_BYTES_MAX else text


def check_answer_fits(prepared: Prepared, bytes_max: int) -> None:
    """Raises AnswerTooLarge before anything runs when even the shortest answer to this request is too large to store."""
    least = 0
    for job in prepared.jobs:
        sampling = job.sampling
        if sampling.logprobs is None or job.stop:
            continue
        tokens = sampling.max_tokens if sampling.ignore_eos and not sampling.stop_token_ids else sampling.min_tokens
        least += tokens * (CHAT_TOKEN_BYTES * (sampling.logprobs + 1) if prepared.chat else TEXT_TOKEN_BYTES)
    if least > bytes_max:
        raise AnswerTooLarge(f"the answer would have at least {least} bytes, a result may have {bytes_max}; {LESS}")
