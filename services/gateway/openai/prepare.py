"""Turns a parsed request into Jobs: resolves the model, tokenizes, checks every number against this model. No HTTP here.

request = protocol.parse(body)
prepared = await preparer.prepare(request, tenant="acme", slo=preparer.slo({"class": "batch"}))
prepared.jobs        one Job per choice: prompts times n, in the order of the answer's choices
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from motet.policies.lengths import features as length_features
from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.openai import conversation
from motet.services.gateway.openai.embeddings import EmbeddingRequest, PreparedEmbeddings
from motet.services.gateway.openai.lanes import Lane
from motet.services.gateway.openai.output_parsers import THINK, Parsing
from motet.services.gateway.openai.profiles import Profile, Profiles
from motet.services.gateway.openai.prompt import ForeignTemplate, Prompts
from motet.services.gateway.openai.protocol import SEQUENCES_MAX, ChatRequest, CompletionRequest, NamedTool
from motet.services.gateway.openai.unknown_model import unknown_model
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.stream import Job
from motet.shared.adapter_watch import AdapterWatch, ref_of
from motet.shared.chat_templates import ChatTemplate
from motet.shared.clock import now_s, unix_ms
from motet.shared.errors import BadRequest, PromptTooLong, TooLarge
from motet.shared.model import AdapterRef, EmbeddingParams, SamplingParams, Slo, StructuredOutput
from motet.shared.telemetry import logger
from motet.shared.tenancy import DEFAULT_TENANT, qualified
from motet.shared.wire.request import Image

T = TypeVar("T")
log = logger("motet.prepare")
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
DECODED_TOKENS = 256  # of a prompt of token ids: as much of it as the predictor looks at
SCORES_MAX = 49_152  # log-probabilities of one prompt: 14 bytes each, in a message of at most 1 MiB
TAG_TOKENS = 16  # at the end of a prompt, where a chat template may open the reasoning
MESSAGE_BYTES = 1 << 20  # NATS's default
REQUEST_BYTES = 1 << 18  # of a message: for what a request has beside its images
SLO_MIN_MS = 0.001  # numbers near zero would overflow where objectives are divided by
SLO_MAX_MS = 3_600_000
SLO_FIELDS = {"class": "slo.class", "ttft_ms": "slo.ttft_ms", "tpot_ms": "slo.tpot_ms"}
SEED_MASK = (1 << 63) - 1
SEED_STEP = 0x9E3779B97F4A7C15  # between the choices of one request: odd, so that no two are equal


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is ready to run, with the facts that its answer needs."""

    request: ChatRequest | CompletionRequest
    request_id: str  # "chatcmpl-..." or "cmpl-...", as answers show it; clients choose it, jobs have ids of their own
    created_s: int  # Unix time
    model: str  # as the client named it
    jobs: list[Job]
    echoes: list[str]  # per choice: the prompt's text to show first, "" for none
    parsing: Parsing | None = None  # how the text is parsed; None: not at all

    @property
    def chat(self) -> bool:
        """Whether the answer is a chat completion."""
        return isinstance(self.request, ChatRequest)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the whole request; the n choices of a prompt share theirs."""
        return sum(len(job.prompt) for job in self.jobs[:: self.request.n or 1])


class _Told(NamedTuple):
    """What is known of a chat whose template is rendered elsewhere: its images, and the text."""

    images: list[Image] = []
    text: str | None = None


class Preparer:
    """Prepares requests (`Prepared`) for one base model."""

    def __init__(
        self,
        config: GatewayConfig,
        prompts: Prompts,
        adapters: AdapterWatch,
        fleet: Fleet,
        weight: Callable[[str], float],
        profiles: Profiles,
        message_bytes: Callable[[], int] = lambda: MESSAGE_BYTES,
    ) -> None:
        """`weight(tenant)` is the tenant's share relative to others' while workers are saturated; `message_bytes()` the largest
        message in the mesh. Not for use in threads, except what `_now` returns."""
        self._weight, self._message_bytes = weight, message_bytes
        self._config, self._prompts, self._adapters, self._fleet = config, prompts, adapters, fleet
        self._profiles = profiles
        self.base_model = config.base.name
        self._fixed_model_len = 0

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus output that can be served now, in tokens."""
        return self._fixed_model_len or self._fleet.max_model_len(self._prompts.context_length)

    def _now(self) -> Preparer:
        """This preparer with the present `max_model_len`, for a thread: workers come and go in the event loop."""
        preparer = copy.copy(self)
        preparer._fixed_model_len = self.max_model_len
        return preparer

    def slo(self, given: Mapping[str, Any], *, names: Mapping[str, str] = SLO_FIELDS) -> Slo:
        """The objective from `class`, `ttft_ms` and `tpot_ms`, each optional.

        Raises BadRequest naming the field by the client's name for it (`names`).
        """
        classes = self._config.slo.classes
        name = given.get("class", "standard")
        base = classes.get(name) if isinstance(name, str) else None
        if base is None:
            raise BadRequest(f"{names['class']}: {name!r} is not one of {', '.join(classes)}", param=names["class"])
        return Slo(
            slo_class=base.slo_class,
            ttft_slo_ms=_milliseconds(given.get("ttft_ms", base.ttft_slo_ms), names["ttft_ms"]),
            tpot_slo_ms=_milliseconds(given.get("tpot_ms", base.tpot_slo_ms), names["tpot_ms"]),
        )

    def adapter(self, model: str | None, tenant: str = DEFAULT_TENANT, *, param: str = "model") -> AdapterRef | None:
        """The adapter version that a model name refers to for `tenant`; None for the base model.

        Raises ModelNotFound naming `param`.
        """
        if not model or model == self.base_model:
            return None
        info = self._adapters.resolve(model, tenant)
        if info is None and model.startswith(self.base_model + ":"):
            info = self._adapters.resolve(model.removeprefix(self.base_model + ":"), tenant)
        if info is None or info.version.base_model != self.base_model:
            raise unknown_model(model, self._adapters, tenant, self.base_model, param=param)
        return msgspec.structs.replace(ref_of(info), name=qualified(info.entry.name, info.entry.tenant))

    def profile(self, adapter: AdapterRef | None) -> Profile:
        """What requests on an adapter, or on the base model, use: templates, defaults, tokens that end an answer."""
        version = self._adapters.by_digest(adapter.digest) if adapter is not None else None
        return self._profiles.of(version.chat if version is not None else "")

    def template(self, profile: Profile, tenant: str, *, tools: bool) -> ChatTemplate | ForeignTemplate:
        """The chat template of a request. Raises BadRequest when there is none."""
        return self._profiles.template(profile, tools=tools, tenant=tenant)

    async def prepare(
        self,
        request: ChatRequest | CompletionRequest,
        *,
        tenant: str = DEFAULT_TENANT,
        slo: Slo | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        drawn: str = "",
        lane: Lane | None = None,
        size: int = 0,
    ) -> Prepared:
        """The request, resolved and tokenized. Raises BadRequest (naming the field), PromptTooLong or ModelNotFound.

        `request_id` is the header's; without it the body's, else `drawn`. `drawn` is unique; it is the id in the mesh and its
        logs, since clients may use one id for two requests at once. A request of many bytes (`size`) is prepared in a thread of
        `lane`, which may raise Overloaded.
        """
        arrived_s, preparer = now_s(), self._now()
        model, adapter = self._named(request, tenant)
        profile, template, told = self.profile(adapter), None, _Told()

        async def run(work: Callable[[], T]) -> T:
            return work() if lane is None else await lane.run(work, size, tenant)

        if isinstance(request, ChatRequest):
            template = self.template(profile, tenant, tools=bool(request.usable_tools()))
            if not isinstance(template, ChatTemplate):
                foreign, asked = template, request
                told, messages, how = await run(lambda: preparer._for_rendering(asked, foreign))
                told = told._replace(text=await foreign.render(messages, **how))

        def work() -> Prepared:
            try:
                return preparer._prepare(
                    request, model, adapter, profile, template, told, tenant, slo, timeout_s, request_id, drawn, arrived_s
                )
            except RecursionError:
                raise BadRequest("the request is nested too deeply") from None

        return await run(work)

    def _prepare(
        self,
        request: ChatRequest | CompletionRequest,
        model: str,
        adapter: AdapterRef | None,
        profile: Profile,
        template: ChatTemplate | ForeignTemplate | None,
        told: _Told,
        tenant: str,
        slo: Slo | None,
        timeout_s: float | None,
        request_id: str,
        drawn: str,
        arrived_s: float,
    ) -> Prepared:
        chat = isinstance(request, ChatRequest)
        stops, images = request.stops(), told.images
        if isinstance(request, ChatRequest):
            assert template is not None
            if isinstance(template, ChatTemplate):
                images = self._images(request, template)
            prompts, given = self._chat_prompt(request, template, profile, told.text), list[str | list[int]]([""])
        else:
            prompts, given = self._text_prompts(request, profile)
        n = request.n or 1
        if len(prompts) * n > SEQUENCES_MAX:
            raise BadRequest(f"{len(prompts)} prompts times n={n} is more than {SEQUENCES_MAX} sequences", param="n")
        drawn = drawn or secrets.token_hex(12)
        prefix = "chatcmpl-" if chat else "cmpl-"
        seed = (request.seed if request.seed is not None else secrets.randbits(63)) & SEED_MASK
        bad_words = self._bad_words(request.bad_words or [])
        constraint = request.constraint()
        needs = {"structured": constraint[0]} if constraint else {}
        if images:
            needs["images"] = images[0].param
        if scored := request.prompt_logprobs_wanted():
            needs["prompt_logprobs"] = scored[0]
            self._check_scored(scored, max(map(len, prompts)))
        parsing = None
        if isinstance(request, ChatRequest):
            parsing = self._parsing(request, prompts[0], constrained=constraint is not None)
        shows_special = parsing is not None and bool(parsing.tools)  # some formats are made of special tokens
        jobs: list[Job] = []
        for number, prompt in enumerate(prompts):
            sampling = self._sampling(request, profile, len(prompt), bad_words, constraint[1] if constraint else None)
            if scored:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=scored[1])
            features, excerpt = self._for_predictor(request, given[number], prompt, sampling)
            for _ in range(n):
                choice_seed = (seed + len(jobs) * SEED_STEP) & SEED_MASK
                jobs.append(
                    Job(
                        request_id=f"{prefix}{drawn}-{len(jobs)}",
                        model=model,
                        prompt=prompt,
                        sampling=msgspec.structs.replace(sampling, seed=choice_seed),
                        slo=_objective(slo or self._config.slo.classes["standard"], sampling.max_tokens),
                        adapter=adapter,
                        tenant=tenant,
                        tenant_weight=self._weight(tenant),
                        stop=stops,
                        include_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
                        skip_special_tokens=request.skip_special_tokens is not False and not shows_special,
                        silent=request.max_tokens == 0 and not chat,
                        left_out=profile.left_out,
                        eos_token_ids=profile.eos_token_ids,
                        continues_text=not chat or bool(request.continue_final_message),  # type: ignore[union-attr]
                        features=features,
                        prompt_text=excerpt,
                        cache_salt=request.cache_salt or "",
                        priority=request.priority or 0,
                        needs=needs,
                        images=images,
                        timeout_s=timeout_s or self._config.requests.request_timeout_s,
                        arrived_s=arrived_s,
                    )
                )
        named = request_id or request.request_id or request.rid
        if named:
            log.info("named", extra={"request_id": prefix + drawn, "client_id": named})
        prepared = Prepared(
            request=request,
            request_id=prefix + (named or drawn),
            created_s=unix_ms() // 1000,
            model=model,
            jobs=jobs,
            echoes=self._echoes(request, given, prompts, n),
            parsing=parsing,
        )
        request.forget_content()
        return prepared

    async def prepare_embeddings(
        self,
        request: EmbeddingRequest,
        *,
        tenant: str = DEFAULT_TENANT,
        slo: Slo | None = None,
        request_id: str = "",
        drawn: str = "",
        lane: Lane | None = None,
        size: int = 0,
    ) -> PreparedEmbeddings:
        """The request, with every input resolved and tokenized; arguments and errors as for `prepare`."""
        arrived_s, preparer = now_s(), self._now()
        adapter = self.adapter(request.model, tenant)

        def work() -> PreparedEmbeddings:
            return preparer._prepare_embeddings(request, adapter, tenant, slo, request_id, drawn, arrived_s)

        return work() if lane is None else await lane.run(work, size, tenant)

    def _prepare_embeddings(
        self,
        request: EmbeddingRequest,
        adapter: AdapterRef | None,
        tenant: str,
        slo: Slo | None,
        request_id: str,
        drawn: str,
        arrived_s: float,
    ) -> PreparedEmbeddings:
        given = request.inputs()
        texts = [text for text in given if isinstance(text, str)]
        special, keep = request.add_special_tokens is not False, request.truncate_prompt_tokens
        longest = self.max_model_len if keep is None else None
        tokenized = iter(self._prompts.texts(texts, add_special_tokens=special, longest=longest, param="input"))
        drawn, jobs = drawn or secrets.token_hex(12), list[Job]()
        for one in given:
            tokens = next(tokenized) if isinstance(one, str) else self._known(one, "input")
            if keep is not None:
                kept = keep if keep > 0 else self.max_model_len
                tokens = tokens[-kept:] if request.truncation_side == "left" else tokens[:kept]
            jobs.append(
                Job(
                    request_id=f"embd-{drawn}-{len(jobs)}",
                    model=request.model or self.base_model,
                    prompt=self._checked(tokens, "input", room=0),
                    sampling=SamplingParams(max_tokens=1, temperature=0.0),
                    slo=_objective(slo or self._config.slo.classes["standard"], 1),
                    adapter=adapter,
                    tenant=tenant,
                    tenant_weight=self._weight(tenant),
                    cache_salt=request.cache_salt or "",
                    priority=request.priority or 0,
                    needs={"embeddings": "model"},
                    embedding=EmbeddingParams(dimensions=request.dimensions),
                    timeout_s=self._config.requests.request_timeout_s,
                    arrived_s=arrived_s,
                )
            )
        if named := request_id or request.request_id:
            log.info("named", extra={"request_id": f"embd-{drawn}", "client_id": named})
        request.input = None  # the request is kept while it runs, and its inputs are in the jobs
        return PreparedEmbeddings(request=request, model=request.model or self.base_model, jobs=jobs)

    def _for_predictor(
        self, request: ChatRequest | CompletionRequest, given: str | list[int], prompt: list[int], sampling: SamplingParams
    ) -> tuple[bytes, str]:
        """Packed features of one prompt and of the parameters, and with --send-prompts an excerpt of the prompt's text.

        Of a conversation the text is that of its last message, with the system prompt's identity.
        """
        system, turns = "", 0
        if isinstance(request, ChatRequest):
            messages = request.conversation()
            first, text, turns = messages[0], str(messages[-1].get("content") or ""), len(messages)
            if first.get("role") in ("system", "developer"):
                system = str(first.get("content") or "")
        else:
            text = given if isinstance(given, str) else self._prompts.tokenizer.decode(prompt[-DECODED_TOKENS:])
        found = length_features.text_features(text)
        found += length_features.request_features(len(prompt), sampling, stops=len(request.stops()), turns=turns, system=system)
        excerpt = length_features.excerpt(text) if self._config.requests.send_prompts else ""
        return length_features.pack(found), excerpt

    def _named(self, request: ChatRequest | CompletionRequest, tenant: str) -> tuple[str, AdapterRef | None]:
        """The model's name as the client gave it, and the adapter. `model`, `lora_path` and `adapter_id` must not differ."""
        model, adapter = request.model or self.base_model, self.adapter(request.model, tenant)
        for param in ("lora_path", "adapter_id"):
            name = getattr(request, param)
            found = self.adapter(name, tenant, param=param)
            if found is None:
                continue
            if adapter is not None and found.digest != adapter.digest:
                raise BadRequest(f"{param}: {name!r} and {model!r} are different adapters", param=param)
            model, adapter = name, found
        return model, adapter

    def _for_rendering(
        self, request: ChatRequest, template: ForeignTemplate
    ) -> tuple[_Told, list[dict[str, Any]], dict[str, Any]]:
        """The images of a chat whose template is rendered elsewhere, the messages for the template, and how it renders them."""
        images, how = self._images(request, template), _how(request, template)
        return _Told(images), conversation.read_by(request.messages, template), how

    def _chat_prompt(
        self, request: ChatRequest, template: ChatTemplate | ForeignTemplate, profile: Profile, rendered: str | None
    ) -> list[list[int]]:
        special, whole, longest = bool(request.add_special_tokens), profile.whole, self._longest(request)
        if isinstance(template, ChatTemplate):
            rendered = template.render(conversation.read_by(request.messages, template), **_how(request, template))
        assert rendered is not None
        tokens = self._prompts.rendered(rendered, add_special_tokens=special, whole=whole, longest=longest)
        return [self._checked(self._truncated(request, tokens), "messages")]

    def _images(self, request: ChatRequest, template: ChatTemplate | ForeignTemplate) -> list[Image]:
        """The images of a chat. Raises BadRequest or TooLarge naming the part or the field that does not go with it."""
        images = request.take_images()
        if not images:
            return images
        if not template.takes_images:
            at = images[0].param
            raise BadRequest(f"{at}: this model's chat template has no place for images", param=at)
        for param in ("truncate_prompt_tokens", "prompt_logprobs"):
            if getattr(request, param) is not None:
                raise BadRequest(f"{param} is not supported with images", param=param)
        size, most = sum(len(image.data) for image in images), self._message_bytes() - REQUEST_BYTES
        if size > most:
            at = images[-1].param
            raise TooLarge(f"{at}: the images have {size} bytes together; a request may have {most}", param=at)
        return images

    def _parsing(self, request: ChatRequest, prompt: list[int], *, constrained: bool) -> Parsing | None:
        """How answers are parsed. Raises BadRequest when the format of tool calls is not known."""
        options, tools, choice = self._config.answers, request.usable_tools(), request.tool_choice
        thinks = bool(options.reasoning_parser) and request.separate_reasoning is not False
        if not tools and not thinks:
            return None
        if tools and choice in (None, "auto") and not options.tool_call_parser:
            raise BadRequest("tools: this gateway has no --tool-call-parser", param="tools")
        begins_inside = False
        if thinks:
            end = self._prompts.tokenizer.decode(prompt[-TAG_TOKENS:], skip_special_tokens=False).rstrip()
            implied = options.reasoning_parser == "deepseek_r1" and not end.endswith(THINK[1])
            begins_inside = implied or end.endswith(THINK[0])
        return Parsing(
            reasoning=thinks,
            begins_inside=begins_inside,
            constrained=constrained,
            shows_reasoning=request.include_reasoning is not False,
            tools="" if not tools else options.tool_call_parser if choice in (None, "auto") else _forced(choice),
            function=choice.function.name if isinstance(choice, NamedTool) else "",
            parallel=request.parallel_tool_calls is not False,
            short_ids=options.tool_call_parser == "mistral",
        )

    def _text_prompts(self, request: CompletionRequest, profile: Profile) -> tuple[list[list[int]], list[str | list[int]]]:
        """The tokens of each prompt, and the prompts as the client gave them."""
        given = request.prompts()
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        special = request.add_special_tokens is not False
        longest, whole = self._longest(request), profile.whole
        tokenized = iter(self._prompts.texts(texts, add_special_tokens=special, whole=whole, longest=longest))
        prompts = [next(tokenized) if isinstance(prompt, str) else self._known(prompt) for prompt in given]
        return [self._checked(self._truncated(request, tokens), "prompt") for tokens in prompts], given

    def _longest(self, request: ChatRequest | CompletionRequest) -> int | None:
        """The largest useful number of prompt tokens; None for any number."""
        return self.max_model_len if request.truncate_prompt_tokens is None else None

    def _truncated(self, request: ChatRequest | CompletionRequest, tokens: list[int]) -> list[int]:
        keep = request.truncate_prompt_tokens
        if keep is None:
            return tokens
        if keep < 0:
            wanted = request.max_tokens
            if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
                wanted = request.max_completion_tokens
            keep = max(self.max_model_len - (wanted or 1), 1)
        return tokens[:keep] if request.truncation_side == "right" else tokens[-keep:]

    def _known(self, tokens: list[int], param: str = "prompt") -> list[int]:
        size = self._prompts.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            wrong = next(token for token in tokens if not 0 <= token < size)
            raise BadRequest(f"token id {wrong} is outside the vocabulary of {size}", param=param)
        return tokens

    def _checked(self, tokens: list[int], param: str, *, room: int = 1) -> list[int]:
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

    def _check_scored(self, scored: tuple[str, int], prompt_tokens: int) -> None:
        """Log-probabilities of a prompt come in one message, whose size is limited."""
        field, rivals = scored
        if prompt_tokens * (rivals + 1) > SCORES_MAX:
            raise BadRequest(
                f"{field}: {prompt_tokens} tokens with {rivals} log-probabilities beside their own are more than the"
                f" {SCORES_MAX} that are returned",
                param=field,
            )

    def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words: at the beginning of a text and, where that differs, after a space (as vLLM)."""
        if not words:
            return ()
        bare = self._prompts.texts([word.lstrip() for word in words], add_special_tokens=False)
        spaced = self._prompts.texts([" " + word.lstrip() for word in words], add_special_tokens=False)
        found = [tuple(tokens) for tokens in bare]
        found += [tuple(b) for a, b in zip(bare, spaced, strict=True) if a and b and a[0] != b[0] and len(a) == len(b)]
        if not all(found):
            raise BadRequest("bad_words: a word has no tokens", param="bad_words")
        return tuple(dict.fromkeys(found))

    def _sampling(
        self,
        request: ChatRequest | CompletionRequest,
        profile: Profile,
        prompt_tokens: int,
        bad_words: tuple[tuple[int, ...], ...],
        structured: StructuredOutput | None,
    ) -> SamplingParams:
        room = self.max_model_len - prompt_tokens
        defaults, ignore_eos = profile.defaults, bool(request.ignore_eos or request.ignore_eos_token)
        ends = () if ignore_eos else profile.eos_token_ids
        asked, param = request.max_tokens, "max_tokens"
        if isinstance(request, ChatRequest):
            if request.max_completion_tokens is not None:
                asked, param = request.max_completion_tokens, "max_completion_tokens"
            max_tokens = asked or min(room, defaults.max_new_tokens or room)
        else:
            max_tokens = min(room, COMPLETION_MAX_TOKENS) if asked is None else max(asked, 1)  # 0: `Job.silent`
        if max_tokens > room:
            part = "messages" if isinstance(request, ChatRequest) else "prompt"
            raise PromptTooLong.of(
                room + prompt_tokens,
                f"you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {part}, {max_tokens} in the"
                f" completion). Please reduce the length of the {part} or {param}.",
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
            stop_token_ids=tuple(dict.fromkeys((*(request.stop_token_ids or ()), *ends))),
            ignore_eos=ignore_eos,
            logprobs=request.logprobs_wanted(),
            allowed_token_ids=self._allowed(request.allowed_token_ids or []),
            bad_words=bad_words,
            structured=structured,
        )

    def _allowed(self, tokens: list[int]) -> tuple[int, ...]:
        size = self._prompts.vocab_size
        if tokens and max(tokens) >= size:
            raise BadRequest(f"token id {max(tokens)} is outside the vocabulary of {size}", param="allowed_token_ids")
        return tuple(sorted(set(tokens)))

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        out = {}
        for key, bias in given.items():
            if int(key) >= self._prompts.vocab_size:
                size = self._prompts.vocab_size
                raise BadRequest(f"{key!r} is not a token id below the vocabulary's {size}", param="logit_bias")
            out[int(key)] = bias
        return out

    def _echoes(
        self, request: ChatRequest | CompletionRequest, given: list[str | list[int]], prompts: list[list[int]], n: int
    ) -> list[str]:
        if isinstance(request, ChatRequest) or not request.echo:
            return [""] * (len(prompts) * n)
        whole = request.truncate_prompt_tokens is None
        texts = [
            text if isinstance(text, str) and whole else self._prompts.text(tokens, skip_special_tokens=True)
            for text, tokens in zip(given, prompts, strict=True)
        ]
        return [text for text in texts for _ in range(n)]


def _how(request: ChatRequest, template: ChatTemplate | ForeignTemplate) -> dict[str, Any]:
    """How the template renders the messages."""
    return {
        "add_generation_prompt": request.add_generation_prompt is not False,
        "continue_final_message": bool(request.continue_final_message),
        "variables": _variables(request, template),
    }


def _variables(request: ChatRequest, template: ChatTemplate | ForeignTemplate) -> dict[str, Any] | None:
    """The chat template's variables. A field that the template does not use is refused by name."""
    effort, documents, reads = request.reasoning_effort, request.documents, template.reads
    given: dict[str, Any] = {}
    if tools := request.usable_tools():
        if "tools" not in reads:
            raise BadRequest("tools: this model's chat template does not read them", param="tools")
        given["tools"] = msgspec.to_builtins(tools)
    if documents:
        if "documents" not in reads:
            raise BadRequest("documents: this model's chat template does not read them", param="documents")
        given["documents"] = documents
    if effort is not None and reads.isdisjoint(("reasoning_effort", "enable_thinking")):
        if effort != "none":
            raise BadRequest("reasoning_effort: this model's chat template does not read it", param="reasoning_effort")
    elif effort is not None:
        given |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return given | (request.chat_template_kwargs or {}) or None


def _forced(choice: Any) -> Literal["named", "required"]:
    return "named" if isinstance(choice, NamedTool) else "required"


def _first(*values: T | None) -> T:
    """The first that is given."""
    return next(value for value in values if value is not None)


def _objective(slo: Slo, max_tokens: int) -> Slo:
    """One token has no time between tokens, so a request for one neither misses such an objective nor limits its neighbours."""
    return msgspec.structs.replace(slo, tpot_slo_ms=float(SLO_MAX_MS)) if max_tokens == 1 else slo


def _milliseconds(given: Any, name: str) -> float:
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = math.nan
    if not SLO_MIN_MS <= value <= SLO_MAX_MS:
        raise BadRequest(f"{name}: expected {SLO_MIN_MS} to {SLO_MAX_MS} milliseconds, got {given!r}", param=name)
    return value
