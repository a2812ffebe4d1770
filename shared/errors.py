"""The error tree. An error keeps its facts as fields and has an HTTP status and an OpenAI code.

    MotetError                     500  internal_error
    ├── BadRequest                 400  invalid_value            names the field in `param`
    │   ├── PromptTooLong          400  context_length_exceeded
    │   └── InvalidAdapter         400  invalid_adapter
    ├── Unauthorized               401  invalid_api_key
    ├── Forbidden                  403  permission_denied
    ├── NotFound                   404  not_found
    │   ├── ModelNotFound          404  model_not_found
    │   └── AdapterNotFound        404  adapter_not_found
    ├── Conflict                   409  conflict
    │   ├── AdapterExists          409  adapter_exists
    │   ├── AdapterInUse           409  adapter_in_use
    │   └── AdapterQuarantined     409  adapter_quarantined      its probe failed; it does not answer until that is lifted
    ├── Timeout                    408  request_timeout          the client was too slow to send it
    ├── TooLarge                   413  request_too_large
    │   ├── AnswerTooLarge         413  answer_too_large         more than one message can carry
    │   └── HeadersTooLarge        431  headers_too_large
    ├── UnsupportedMediaType       415  unsupported_media_type
    ├── Overloaded                 429  overloaded               carries `retry_after_s`
    ├── Unavailable                503  unavailable              no worker or service can do this at present
    │   ├── WorkerLost             503  worker_lost              resumable on another worker
    │   └── WorkerFull             503  worker_full              can never be done on this worker, perhaps on another
    └── DeadlineExceeded           504  deadline_exceeded

Every class crosses the bus as `ErrorInfo` and comes back as the same class (`from_info`).

All texts of an error are bounded (`MESSAGE_CHARS`, `PARAM_CHARS`): reasons quote client input, and an answer that exceeds the
message limit would be lost.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

MESSAGE_CHARS = 2_000
PARAM_CHARS = 200


def bounded(text: str, limit: int = MESSAGE_CHARS) -> str:
    """`text`, cut to `limit` characters; a cut text ends with its original length."""
    if len(text) <= limit:
        return text
    note = f"... (cut, {len(text)} characters)"
    return text[: limit - len(note)] + note


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error on the wire."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused or failed."""

    message: Annotated[str, Meta(description=f"The reason, for people; at most {MESSAGE_CHARS:,} characters.")]
    type: Annotated[
        str, Meta(description="invalid_request_error, rate_limit_error, server_error, or vLLM's names on its routes.")
    ]
    param: Annotated[str | None, Meta(description="The field or header that is wrong.")]
    code: Annotated[str | int, Meta(description="A stable name of the reason; on vLLM's routes the status.")]


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer with a status of 400 or more, as OpenAI clients expect it."""

    error: Error


class MotetError(Exception):
    """Base of all errors. `param` names the offending input field, `retry_after_s` is in seconds."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        self.message = bounded(message)
        self.param = None if param is None else bounded(param, PARAM_CHARS)
        super().__init__(self.message)
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        """The form in which the error crosses the bus."""
        return ErrorInfo(code=self.code, message=self.message, param=self.param, retry_after_s=self.retry_after_s)

    def openai(self) -> ErrorAnswer:
        """The body an OpenAI client expects."""
        return ErrorAnswer(error=Error(message=self.message, type=self.kind, param=self.param, code=self.code))


class BadRequest(MotetError):
    status, code, kind = 400, "invalid_value", "invalid_request_error"


class PromptTooLong(BadRequest):
    code = "context_length_exceeded"

    @classmethod
    def of(cls, longest: int, given: str, *, param: str) -> PromptTooLong:
        """The error in OpenAI's words, by which clients know it. `longest`: tokens; `given`: what the request has instead."""
        return cls(f"This model's maximum context length is {longest} tokens. However, {given}", param=param)


class InvalidAdapter(BadRequest):
    code = "invalid_adapter"


class Unauthorized(MotetError):
    status, code, kind = 401, "invalid_api_key", "invalid_request_error"


class Forbidden(MotetError):
    status, code, kind = 403, "permission_denied", "invalid_request_error"


class NotFound(MotetError):
    status, code, kind = 404, "not_found", "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class AdapterNotFound(NotFound):
    code = "adapter_not_found"


class Conflict(MotetError):
    status, code, kind = 409, "conflict", "invalid_request_error"


class AdapterExists(Conflict):
    code = "adapter_exists"


class AdapterInUse(Conflict):
    code = "adapter_in_use"


class AdapterQuarantined(Conflict):
    code = "adapter_quarantined"

    @classmethod
    def of(cls, name: str, reason: str) -> AdapterQuarantined:
        """The error for a request. `name`: of the adapter, or its digest."""
        return cls(f"adapter {name!r} is quarantined: {reason}", param="model")


class Timeout(MotetError):
    status, code, kind = 408, "request_timeout", "invalid_request_error"


class TooLarge(MotetError):
    status, code, kind = 413, "request_too_large", "invalid_request_error"


class AnswerTooLarge(TooLarge):
    code = "answer_too_large"


class HeadersTooLarge(TooLarge):
    status, code = 431, "headers_too_large"


class UnsupportedMediaType(MotetError):
    status, code, kind = 415, "unsupported_media_type", "invalid_request_error"


class Overloaded(MotetError):
    status, code, kind = 429, "overloaded", "rate_limit_error"


class Unavailable(MotetError):
    status, code = 503, "unavailable"


class WorkerLost(Unavailable):
    code = "worker_lost"


class WorkerFull(Unavailable):
    code = "worker_full"


class DeadlineExceeded(MotetError):
    status, code = 504, "deadline_exceeded"


def _tree(cls: type[MotetError]) -> dict[str, type[MotetError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


_BY_CODE = _tree(MotetError)


def from_info(info: ErrorInfo) -> MotetError:
    """The error that `info` was made from; an unknown code (a newer peer) becomes a plain MotetError."""
    cls = _BY_CODE.get(info.code, MotetError)
    return cls(info.message, param=info.param, retry_after_s=info.retry_after_s)
