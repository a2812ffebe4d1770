"""From a parsed request to Jobs: resolve the model, make tokens, check every number against this model. No HTTP here.

request = protocol.parse(body)
plan = await planner.plan(request, tenant="acme", slo=planner.slo({"class": "batch"}))
plan.jobs            one Job per choice: prompts times n, in the order of the answer's choices
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.fleet import Fleet
from services.gateway.prompt import Prompts
from services.gateway.protocol import BIASES_MAX, SEQUENCES_MAX, ChatRequest, CompletionRequest
from services.gateway.stream import Job
from shared.clock import now_s, unix_ms
from shared.errors import BadRequest, ModelNotFound, PromptTooLong
from shared.messages import AdapterInfo
from shared.model import AdapterRef, SamplingParams, Slo
from shared.tenancy import DEFAULT_TENANT, qualified

T = TypeVar("T")
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
SLO_MAX_MS = 3_600_000
SLO_FIELDS = {"class": "slo.class", "ttft_ms": "slo.ttft_ms", "tpot_ms": "slo.tpot_ms"}
SEED_MASK = (1 << 63) - 1
SEED_STEP = 0x9E3779B97F4A7C15  # between the choices of one request: odd, so that no two are equal


class Adapters(Protocol):
    """Names to versions (shared.adapter_watch.AdapterWatch)."""

    def resolve(self, name: str, tenant: str) -> AdapterInfo | None: ...


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A request ready to run and what its answer needs to say."""

    request: ChatRequest | CompletionRequest
    request_id: str  # "chatcmpl-..." or "cmpl-..."; job i is "<request_id>-<i>"
    created_s: int  # Unix time
    model: str  # as the client named it
    jobs: list[Job]
    echoes: list[str]  # per choice: the prompt's text to show first, "" for none

    @property
    def chat(self) -> bool:
        """Whether the answer is a chat completion."""
        return isinstance(self.request, ChatRequest)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the whole request; the n choices of a prompt share theirs."""
        return sum(len(job.prompt) for job in self.jobs[:: self.request.n or 1])


class Planner:
    """Makes Plans for one base model."""

    def __init__(self, config: GatewayConfig, prompts: Prompts, adapters: Adapters, fleet: Fleet) -> None:
        self._config, self._prompts, self._adapters, self._fleet = config, prompts, adapters, fleet
        self.base_model = config.base_model

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output that can be served now, in tokens."""
        return self._fleet.max_model_len(self._prompts.context_length)

    def slo(self, given: Mapping[str, Any], *, names: Mapping[str, str] = SLO_FIELDS) -> Slo:
        """The objective from `class`, `ttft_ms` and `tpot_ms`, each optional.

        Raises BadRequest naming the field as the client knows it: `names` says how.
        """
        classes = self._config.slo_classes
        name = given.get("class", "standard")
        base = classes.get(name) if isinstance(name, str) else None
        if base is None:
            raise BadRequest(f"{names['class']}: {name!r} is none of {', '.join(classes)}", param=names["class"])
        return Slo(
            slo_class=base.slo_class,
            ttft_slo_ms=_milliseconds(given.get("ttft_ms", base.ttft_slo_ms), names["ttft_ms"]),
            tpot_slo_ms=_milliseconds(given.get("tpot_ms", base.tpot_slo_ms), names["tpot_ms"]),
        )

    def adapter(self, model: str | None, tenant: str = DEFAULT_TENANT) -> AdapterRef | None:
        """The adapter version that `tenant` means by a model name, None for the base model. Raises ModelNotFound."""
        if not model or model == self.base_model:
            return None
        info = self._adapters.resolve(model, tenant)
        if info is None and model.startswith(self.base_model + ":"):
            info = self._adapters.resolve(model.removeprefix(self.base_model + ":"), tenant)
        if info is None or info.version.base_model != self.base_model:
            raise ModelNotFound(f"The model `{model}` does not exist.", param="model")
        version, name = info.version, qualified(info.entry.name, info.entry.tenant)
        return AdapterRef(name=name, digest=version.digest, rank=version.rank, size_bytes=version.size_bytes)

    async def plan(
        self,
        request: ChatRequest | CompletionRequest,
        *,
        tenant: str = DEFAULT_TENANT,
        slo: Slo | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> Plan:
        """Everything decided and tokenized. Raises BadRequest (naming the field), PromptTooLong or ModelNotFound.

        `request_id` is drawn when not given; two requests that run at once must not share one.
        """
        arrived_s = now_s()
        adapter = self.adapter(request.model, tenant)
        chat = isinstance(request, ChatRequest)
        stops = request.stops()
        prompts = await (self._chat_prompt(request) if isinstance(request, ChatRequest) else self._text_prompts(request))
        n = request.n or 1
        if len(prompts) * n > SEQUENCES_MAX:
            raise BadRequest(f"{len(prompts)} prompts times n={n} is more than {SEQUENCES_MAX} sequences", param="n")
        request_id = request_id or ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        seed = (request.seed if request.seed is not None else secrets.randbits(63)) & SEED_MASK
        jobs: list[Job] = []
        for prompt in prompts:
            sampling = self._sampling(request, len(prompt))
            for _ in range(n):
                choice_seed = (seed + len(jobs) * SEED_STEP) & SEED_MASK
                jobs.append(
                    Job(
                        request_id=f"{request_id}-{len(jobs)}",
                        model=request.model or self.base_model,
                        prompt=prompt,
                        sampling=msgspec.structs.replace(sampling, seed=choice_seed),
                        slo=slo or self._config.slo_classes["standard"],
                        adapter=adapter,
                        tenant=tenant,
                        stop=stops,
                        include_stop=bool(request.include_stop_str_in_output),
                        skip_special_tokens=request.skip_special_tokens is not False,
                        continues_text=not chat or bool(request.continue_final_message),  # type: ignore[union-attr]
                        timeout_s=timeout_s or self._config.request_timeout_s,
                        arrived_s=arrived_s,
                    )
                )
        return Plan(
            request=request,
            request_id=request_id,
            created_s=unix_ms() // 1000,
            model=request.model or self.base_model,
            jobs=jobs,
            echoes=self._echoes(request, prompts, n),
        )

    async def _chat_prompt(self, request: ChatRequest) -> list[list[int]]:
        tokens = await self._prompts.chat(
            request.conversation(),
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            variables=request.chat_template_kwargs,
        )
        return [self._checked(tokens, "messages")]

    async def _text_prompts(self, request: CompletionRequest) -> list[list[int]]:
        given = request.prompts()
        if len(given) > SEQUENCES_MAX:
            raise BadRequest(f"at most {SEQUENCES_MAX} prompts are taken, not {len(given)}", param="prompt")
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        tokenized = iter(await self._prompts.texts(texts, add_special_tokens=request.add_special_tokens is not False))
        prompts = [next(tokenized) if isinstance(prompt, str) else self._known(prompt) for prompt in given]
        return [self._checked(tokens, "prompt") for tokens in prompts]

    def _known(self, tokens: list[int]) -> list[int]:
        size = self._prompts.vocab_size
        wrong = next((t for t in tokens if not 0 <= t < size), None)
        if wrong is not None:
            raise BadRequest(f"token id {wrong} is outside the vocabulary of {size}", param="prompt")
        return tokens

    def _checked(self, tokens: list[int], param: str) -> list[int]:
        longest = self.max_model_len
        if not tokens:
            raise BadRequest("the prompt has no tokens", param=param)
        if len(tokens) >= longest:
            raise PromptTooLong(
                f"This model's maximum context length is {longest} tokens, but the prompt has {len(tokens)} tokens"
                " and needs room for at least one more.",
                param=param,
            )
        return tokens

    def _sampling(self, request: ChatRequest | CompletionRequest, prompt_tokens: int) -> SamplingParams:
        room = self.max_model_len - prompt_tokens
        defaults = self._prompts.defaults
        asked, param = request.max_tokens, "max_tokens"
        if isinstance(request, ChatRequest):
            if request.max_completion_tokens is not None:
                asked, param = request.max_completion_tokens, "max_completion_tokens"
            max_tokens = asked or min(room, defaults.max_new_tokens or room)
        else:
            max_tokens = asked or min(room, COMPLETION_MAX_TOKENS)
        if max_tokens > room:
            raise PromptTooLong(
                f"{param} is {max_tokens}, but the model's maximum context length is {room + prompt_tokens} tokens and the"
                f" prompt has {prompt_tokens}, which leaves {room}.",
                param=param,
            )
        if (request.min_tokens or 0) > max_tokens:
            reason = f"min_tokens is {request.min_tokens}, more than the {max_tokens} tokens allowed"
            raise BadRequest(reason, param="min_tokens")
        top_k = _first(request.top_k, defaults.top_k, 0)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            temperature=_first(request.temperature, defaults.temperature, 1.0),
            top_p=_first(request.top_p, defaults.top_p, 1.0),
            top_k=max(top_k, 0),
            min_p=_first(request.min_p, defaults.min_p, 0.0),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(request.logit_bias or {}),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=request.logprobs_wanted(),
        )

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        if len(given) > BIASES_MAX:
            raise BadRequest(f"at most {BIASES_MAX} tokens can be biased, not {len(given)}", param="logit_bias")
        out = {}
        for key, bias in given.items():
            if not key.isdecimal() or not key.isascii() or len(key) > 10 or int(key) >= self._prompts.vocab_size:
                size = self._prompts.vocab_size
                raise BadRequest(f"{key!r} is not a token id below the vocabulary's {size}", param="logit_bias")
            out[int(key)] = bias
        return out

    def _echoes(self, request: ChatRequest | CompletionRequest, prompts: list[list[int]], n: int) -> list[str]:
        if isinstance(request, ChatRequest) or not request.echo:
            return [""] * (len(prompts) * n)
        given = request.prompts()
        texts = [
            text if isinstance(text, str) else self._prompts.tokenizer.decode(tokens, skip_special_tokens=True)
            for text, tokens in zip(given, prompts, strict=True)
        ]
        return [text for text in texts for _ in range(n)]


def _first(*values: T | None) -> T:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _milliseconds(given: Any, name: str) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value <= SLO_MAX_MS:
        raise BadRequest(f"{name}: expected milliseconds above 0 and at most {SLO_MAX_MS}, got {given!r}", param=name)
    return value
