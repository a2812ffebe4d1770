"""What every kind of request needs to be made ready to run: its model, its objective, checked token ids, its first facts.

    kind.prepare(preparer, request, origin) ──> jobs, one per choice or input

A kind (`texts`, `embeddings`) adds what only it has. No HTTP here.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from motet.policies.memory.kv_blocks import TOLD_TOKENS, cache_scope, prompt_keys, told_tokens
from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.openai.image_base import ImageParts
from motet.services.gateway.openai.lanes import Lane
from motet.services.gateway.openai.profiles import Profile, Profiles
from motet.services.gateway.openai.prompt import ForeignTemplate, Prompts
from motet.services.gateway.openai.unknown_model import unknown_model
from motet.services.gateway.owner.fleet import Fleet
from motet.shared.adapter_watch import AdapterWatch, ref_of
from motet.shared.chat_templates import ChatTemplate
from motet.shared.clock import now_s
from motet.shared.errors import AdapterQuarantined, BadRequest, PromptTooLong
from motet.shared.model import SLO_MAX_MS, TOKEN_BYTES, AdapterRef, Slo
from motet.shared.telemetry import logger
from motet.shared.tenancy import DEFAULT_TENANT, qualified
from motet.shared.wire.prefixes import PrefixKeys, pack_keys

T = TypeVar("T")
log = logger("motet.prepare")
MESSAGE_BYTES = 1 << 20  # NATS's default
KEYS_MAX = 2_048  # of a prompt, for which schedulers look: 131,072 tokens
SLO_MIN_MS = 0.001  # numbers near zero would overflow where objectives are divided by
SLO_FIELDS = {"class": "slo.class", "ttft_ms": "slo.ttft_ms", "tpot_ms": "slo.tpot_ms", "e2e_ms": "slo.e2e_ms"}


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request comes from.

    `named` is the client's id for it in a header; `drawn` is unique and the id in the mesh and its logs, since clients may use
    one id for two requests at once. A request of many bytes (`size`) is prepared in a thread of `lane`.
    """

    tenant: str = DEFAULT_TENANT
    slo: Slo | None = None  # None: the class "standard"
    timeout_s: float | None = None  # None: the configured one
    named: str = ""
    drawn: str = msgspec.field(default_factory=lambda: secrets.token_hex(12))
    lane: Lane | None = None
    size: int = 0
    arrived_s: float = msgspec.field(default_factory=now_s)
    durable: bool = False  # it came over NATS, and its pictures are kept there
    files_url: str = ""  # of pictures: what their ids are appended to
    progress: bool = False  # of pictures: a stream tells of every step

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, from a thread if that may take long. Raises what it raises, Overloaded, and BadRequest for a
        request that is nested too deeply."""

        def guarded() -> T:
            try:
                return work()
            except RecursionError:
                raise BadRequest("the request is nested too deeply") from None

        return guarded() if self.lane is None else await self.lane.run(guarded, self.size, self.tenant)

    def tell(self, prefix: str, named: str | None) -> None:
        """Log under which id the client knows the request `prefix` + `drawn`."""
        if named:
            log.info("named", extra={"request_id": prefix + self.drawn, "client_id": named})


class Preparer:
    """What preparations have in common, for one base model."""

    def __init__(
        self,
        config: GatewayConfig,
        prompts: Prompts,
        adapters: AdapterWatch,
        fleet: Fleet,
        weight: Callable[[str], float],
        profiles: Profiles,
        message_bytes: Callable[[], int] = lambda: MESSAGE_BYTES,
        drawing: ImageParts | None = None,
    ) -> None:
        """`weight(tenant)` is the tenant's share relative to others' while workers are saturated; `message_bytes()` the largest
        message in the mesh; `drawing`: of an image base. Not for use in threads, except what `now` returns."""
        self.weight, self.message_bytes = weight, message_bytes
        self.config, self.prompts, self._adapters, self._fleet = config, prompts, adapters, fleet
        self._profiles, self.drawing = profiles, drawing
        self.base_model = config.base.name
        self._fixed_model_len = 0
        self._schemes: list[tuple[int, bool]] = []

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output that can be served now, in tokens."""
        return self._fixed_model_len or self._fleet.max_model_len(self.prompts.context_length)

    def check_kind(self, draws: bool) -> None:
        """Raises BadRequest when a text is asked of an image base, or a picture of another one."""
        if draws != (self.drawing is not None):
            name = self.base_model
            raise BadRequest(
                f"model: {name} writes texts; pictures need an image base (docs/images.md)"
                if draws
                else f"model: this model draws images: {name} serves /v1/images/generations and /v1/images/edits",
                param="model",
            )

    def drawing_now(self) -> ImageParts:
        """What pictures need. Raises BadRequest for a base that draws none."""
        self.check_kind(draws=True)
        assert self.drawing is not None, "`check_kind` has looked"
        return self.drawing

    def now(self) -> Preparer:
        """This preparer with the present facts of the workers, for a thread: they come and go in the event loop."""
        preparer = copy.copy(self)
        preparer._fixed_model_len = self.max_model_len
        preparer._schemes = self._fleet.prefix_schemes()
        return preparer

    def prefix_keys(self, prompt: bytes, adapter: AdapterRef | None, tenant: str, cache_salt: str) -> tuple[PrefixKeys, ...]:
        """The keys of a prompt's blocks (int32 bytes) by which schedulers find the workers that have them cached."""
        digest = adapter.digest if adapter is not None else ""
        parts = {(size, cache_scope(tenant, cache_salt, shared=shared and not digest)) for size, shared in self._schemes}
        beginning = prompt[: KEYS_MAX * TOLD_TOKENS * TOKEN_BYTES]
        return tuple(
            PrefixKeys(told_tokens(size), pack_keys(prompt_keys(beginning, size, digest, scope)))
            for size, scope in sorted(parts)
        )

    def slo(self, given: Mapping[str, Any], *, names: Mapping[str, str] = SLO_FIELDS) -> Slo:
        """The objective from `class`, `ttft_ms`, `tpot_ms` and `e2e_ms`, each optional.

        The time of a picture's step depends on its size, so pictures have objectives for steps only where the client gives any.
        Raises BadRequest naming the field by the client's name for it (`names`).
        """
        classes = self.config.slo.classes
        name = given.get("class", "standard")
        base = classes.get(name) if isinstance(name, str) else None
        if base is None:
            raise BadRequest(f"{names['class']}: {name!r} is not one of {', '.join(classes)}", param=names["class"])
        if self.drawing is not None and "class" not in given:
            base = msgspec.structs.replace(base, ttft_slo_ms=float(SLO_MAX_MS), tpot_slo_ms=float(SLO_MAX_MS))
        return Slo(
            slo_class=base.slo_class,
            ttft_slo_ms=_milliseconds(given.get("ttft_ms", base.ttft_slo_ms), names["ttft_ms"]),
            tpot_slo_ms=_milliseconds(given.get("tpot_ms", base.tpot_slo_ms), names["tpot_ms"]),
            e2e_slo_ms=_milliseconds(given["e2e_ms"], names["e2e_ms"]) if "e2e_ms" in given else 0.0,
        )

    def objective(self, origin: Origin, max_tokens: int) -> Slo:
        """The objective of a request for so many tokens.

        One token has no time between tokens, so a request for one neither misses such an objective nor limits its neighbours.
        """
        slo = origin.slo or self.slo({})
        return msgspec.structs.replace(slo, tpot_slo_ms=float(SLO_MAX_MS)) if max_tokens == 1 else slo

    def adapter(self, model: str | None, tenant: str = DEFAULT_TENANT, *, param: str = "model") -> AdapterRef | None:
        """The adapter version that a model name refers to for `tenant`; None for the base model.

        Raises ModelNotFound naming `param`, AdapterQuarantined.
        """
        if not model or model == self.base_model:
            return None
        info = self._adapters.resolve(model, tenant)
        if info is None and model.startswith(self.base_model + ":"):
            info = self._adapters.resolve(model.removeprefix(self.base_model + ":"), tenant)
        if info is None or info.version.base_model != self.base_model:
            raise unknown_model(model, self._adapters, tenant, self.base_model, param=param)
        if self._adapters.quarantined and (why := self._adapters.quarantined.get(info.entry.digest)) is not None:
            raise AdapterQuarantined.of(info.entry.name, why.reason)
        return msgspec.structs.replace(ref_of(info), name=qualified(info.entry.name, info.entry.tenant))

    def profile(self, adapter: AdapterRef | None) -> Profile:
        """What requests on an adapter, or on the base model, use: templates, defaults, tokens that end an answer."""
        version = self._adapters.by_digest(adapter.digest) if adapter is not None else None
        return self._profiles.of(version.chat if version is not None else "")

    def template(self, profile: Profile, tenant: str, *, tools: bool) -> ChatTemplate | ForeignTemplate:
        """The chat template of a request. Raises BadRequest when there is none."""
        return self._profiles.template(profile, tools=tools, tenant=tenant)

    def known(self, tokens: list[int], param: str = "prompt") -> list[int]:
        """The token ids, which are all in the vocabulary. Raises BadRequest."""
        size = self.prompts.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            wrong = next(token for token in tokens if not 0 <= token < size)
            raise BadRequest(f"token id {wrong} is outside the vocabulary of {size}", param=param)
        return tokens

    def checked(self, tokens: list[int], param: str, *, room: int = 1) -> list[int]:
        """The tokens, which with `room` more fit the context."""
        longest = self.max_model_len
        if not tokens:
            raise BadRequest(f"the {'prompt' if room else param} has no tokens", param=param)
        if len(tokens) + room > longest:
            more = ", and an answer needs at least one more" if room else ""
            raise PromptTooLong.of(
                longest,
                f"your {param} resulted in {len(tokens)} tokens{more}. Please reduce the length of the {param}.",
                param=param,
            )
        return tokens


def _milliseconds(given: Any, name: str) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not SLO_MIN_MS <= value <= SLO_MAX_MS:
        raise BadRequest(f"{name}: expected {SLO_MIN_MS} to {SLO_MAX_MS} milliseconds, got {given!r}", param=name)
    return value
