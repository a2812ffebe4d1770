"""Chat and text completions made ready to run: the prompt's tokens, the sampling parameters, one job per choice.

    prepared = await texts.prepare(preparer, protocol.parse(body), Origin(tenant="acme"))
    prepared.jobs        prompts times n, in the order of the answer's choices

What both kinds do alike is in `_Draft`; what a conversation or a text does by itself is in its subclass.
"""

from __future__ import annotations

import secrets
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from motet.policies.lengths import features as length_features
from motet.services.gateway.openai import conversation
from motet.services.gateway.openai.output_parsers import THINK, Parsing
from motet.services.gateway.openai.prepare import Origin, Preparer
from motet.services.gateway.openai.prompt import ForeignTemplate
from motet.services.gateway.openai.protocol import SEQUENCES_MAX, ChatRequest, CompletionRequest, NamedTool
from motet.services.gateway.owner.stream import Job
from motet.shared.chat_templates import ChatTemplate
from motet.shared.clock import unix_ms
from motet.shared.errors import BadRequest, PromptTooLong, TooLarge
from motet.shared.model import AdapterRef, SamplingParams
from motet.shared.wire.request import Image, pack_tokens

T = TypeVar("T")
R = TypeVar("R", bound=ChatRequest | CompletionRequest)
Prompt = str | list[int]
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
DECODED_TOKENS = 256  # of a prompt of token ids: as much of it as the predictor looks at
SCORES_MAX = 49_152  # log-probabilities of one prompt: 14 bytes each, in a message of at most 1 MiB
TAG_TOKENS = 16  # at the end of a prompt, where a chat template may open the reasoning
REQUEST_BYTES = 1 << 18  # of a message: for what a request has beside its images
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
        return sum(job.prompt_tokens for job in self.jobs[:: self.request.n or 1])


async def prepare(preparer: Preparer, request: ChatRequest | CompletionRequest, origin: Origin) -> Prepared:
    """The request, resolved and tokenized. Raises BadRequest (naming the field), PromptTooLong, ModelNotFound or Overloaded."""
    if isinstance(request, ChatRequest):
        return await _ChatDraft(preparer, request, origin).prepared()
    return await _CompletionDraft(preparer, request, origin).prepared()


class _Draft(Generic[R]):
    """A request on its way to its jobs. What may take long runs in the origin's lane."""

    prefix: ClassVar[str]
    part: ClassVar[str]
    """The field that the prompt comes from."""

    def __init__(self, preparer: Preparer, request: R, origin: Origin) -> None:
        self.preparer, self.request, self.origin = preparer.now(), request, origin
        self.model, self.adapter = self._named()
        self.profile = preparer.profile(self.adapter)
        self.images: list[Image] = []

    async def prepared(self) -> Prepared:
        """The request that is ready to run."""
        return await self.origin.run(self._make)

    def _named(self) -> tuple[str, AdapterRef | None]:
        """The model's name as the client gave it, and the adapter. `model`, `lora_path` and `adapter_id` must not differ."""
        preparer, tenant = self.preparer, self.origin.tenant
        model, adapter = self.request.model or preparer.base_model, preparer.adapter(self.request.model, tenant)
        for param in ("lora_path", "adapter_id"):
            name = getattr(self.request, param)
            found = preparer.adapter(name, tenant, param=param)
            if found is None:
                continue
            if adapter is not None and found.digest != adapter.digest:
                raise BadRequest(f"{param}: {name!r} and {model!r} are different adapters", param=param)
            model, adapter = name, found
        return model, adapter

    def _make(self) -> Prepared:
        request, origin, n = self.request, self.origin, self.request.n or 1
        given, prompts = self._prompts()
        if len(prompts) * n > SEQUENCES_MAX:
            raise BadRequest(f"{len(prompts)} prompts times n={n} is more than {SEQUENCES_MAX} sequences", param="n")
        sampling, needs = self._constrained(prompts)
        parsing = self._parsing(prompts[0], constrained=sampling.structured is not None)
        seed = request.seed if request.seed is not None else secrets.randbits(63)
        jobs: list[Job] = []
        for one, prompt in zip(given, prompts, strict=True):
            job = self._job(one, prompt, self._sampling(sampling, len(prompt)), needs, parsing)
            for _ in range(n):
                drawn = msgspec.structs.replace(job.sampling, seed=(seed + len(jobs) * SEED_STEP) & SEED_MASK)
                request_id = f"{self.prefix}{origin.drawn}-{len(jobs)}"
                jobs.append(msgspec.structs.replace(job, request_id=request_id, sampling=drawn))
        named = origin.named or request.request_id or request.rid
        origin.tell(self.prefix, named)
        prepared = Prepared(
            request=request,
            request_id=self.prefix + (named or origin.drawn),
            created_s=unix_ms() // 1000,
            model=self.model,
            jobs=jobs,
            echoes=[echo for echo in self._echoes(given, prompts) for _ in range(n)],
            parsing=parsing,
        )
        request.forget_content()
        return prepared

    def _job(
        self, given: Prompt, prompt: list[int], sampling: SamplingParams, needs: dict[str, str], parsing: Parsing | None
    ) -> Job:
        """The job of one prompt, without the id and the seed of a choice."""
        request, preparer, origin = self.request, self.preparer, self.origin
        features, excerpt = self._for_predictor(given, prompt, sampling)
        packed, cache_salt = pack_tokens(prompt), request.cache_salt or ""
        reusable = not self.images and sampling.prompt_logprobs is None
        shows_special = parsing is not None and bool(parsing.tools)  # some formats are made of special tokens
        return Job(
            request_id="",
            model=self.model,
            prompt=packed,
            sampling=sampling,
            slo=preparer.objective(origin, sampling.max_tokens),
            adapter=self.adapter,
            tenant=origin.tenant,
            tenant_weight=preparer.weight(origin.tenant),
            stop=request.stops(),
            include_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
            skip_special_tokens=request.skip_special_tokens is not False and not shows_special,
            silent=self._silent(),
            left_out=self.profile.left_out,
            eos_token_ids=self.profile.eos_token_ids,
            continues_text=self._continues_text(),
            features=features,
            prompt_text=excerpt,
            cache_salt=cache_salt,
            prefix_keys=preparer.prefix_keys(packed, self.adapter, origin.tenant, cache_salt) if reusable else (),
            priority=request.priority or 0,
            needs=needs,
            images=self.images,
            timeout_s=origin.timeout_s or preparer.config.requests.request_timeout_s,
            arrived_s=origin.arrived_s,
        )

    # ---- what chats and texts do differently

    def _prompts(self) -> tuple[list[Prompt], list[list[int]]]:
        """The prompts as the client gave them, and the tokens of each."""
        raise NotImplementedError

    def _max_tokens(self, room: int) -> tuple[int, str]:
        """How many tokens are asked for, where `room` fit, and the field that says so."""
        raise NotImplementedError

    def _told(self, given: Prompt, prompt: list[int]) -> tuple[str, str, int]:
        """What the predictor learns of a prompt: its text, the system prompt's identity, and the number of turns."""
        raise NotImplementedError

    def _echoes(self, given: list[Prompt], prompts: list[list[int]]) -> list[str]:
        """The text to show before the answer to each prompt."""
        return [""] * len(prompts)

    def _parsing(self, prompt: list[int], *, constrained: bool) -> Parsing | None:
        """How answers are parsed. Raises BadRequest when the format of tool calls is not known."""
        return None

    def _silent(self) -> bool:
        return False

    def _continues_text(self) -> bool:
        return True

    # ---- tokens

    def _longest(self) -> int | None:
        """The largest useful number of prompt tokens; None for any number."""
        return self.preparer.max_model_len if self.request.truncate_prompt_tokens is None else None

    def _fitted(self, tokens: list[int]) -> list[int]:
        """The tokens, truncated as the request says. Raises BadRequest or PromptTooLong."""
        request, keep, most = self.request, self.request.truncate_prompt_tokens, self.preparer.max_model_len
        if keep is not None:
            if keep < 0:
                keep = max(most - (self._asked_tokens() or 1), 1)
            tokens = tokens[:keep] if request.truncation_side == "right" else tokens[-keep:]
        return self.preparer.checked(tokens, self.part)

    def _asked_tokens(self) -> int | None:
        return self.request.max_tokens

    def _for_predictor(self, given: Prompt, prompt: list[int], sampling: SamplingParams) -> tuple[bytes, str]:
        """Packed features of one prompt and of the parameters, and with --send-prompts an excerpt of the prompt's text."""
        text, system, turns = self._told(given, prompt)
        stops = len(self.request.stops())
        found = length_features.text_features(text)
        found += length_features.request_features(len(prompt), sampling, stops=stops, turns=turns, system=system)
        excerpt = length_features.excerpt(text) if self.preparer.config.requests.send_prompts else ""
        return length_features.pack(found), excerpt

    # ---- sampling

    def _constrained(self, prompts: list[list[int]]) -> tuple[SamplingParams, dict[str, str]]:
        """The parameters that no prompt changes, and the capabilities that are needed, each with the client's field."""
        request, needs = self.request, dict[str, str]()
        bad_words = self._bad_words(request.bad_words or [])
        constraint = request.constraint()
        if constraint:
            needs["structured"] = constraint[0]
        if self.images:
            needs["images"] = self.images[0].param
        scored = request.prompt_logprobs_wanted()
        if scored:
            needs["prompt_logprobs"] = scored[0]
            _check_scored(scored, max(map(len, prompts)))
        sampling = SamplingParams(
            bad_words=bad_words,
            structured=constraint[1] if constraint else None,
            prompt_logprobs=scored[1] if scored else None,
        )
        return sampling, needs

    def _sampling(self, sampling: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """The parameters for a prompt of this length."""
        request, profile = self.request, self.profile
        room, defaults = self.preparer.max_model_len - prompt_tokens, profile.defaults
        ignore_eos = bool(request.ignore_eos or request.ignore_eos_token)
        ends = () if ignore_eos else profile.eos_token_ids
        max_tokens, param = self._max_tokens(room)
        if max_tokens > room:
            raise PromptTooLong.of(
                room + prompt_tokens,
                f"you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {self.part}, {max_tokens} in the"
                f" completion). Please reduce the length of the {self.part} or {param}.",
                param=param,
            )
        if (request.min_tokens or 0) > max_tokens:
            reason = f"min_tokens is {request.min_tokens}, more than the {max_tokens} tokens allowed"
            raise BadRequest(reason, param="min_tokens")
        return msgspec.structs.replace(
            sampling,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            temperature=_first(request.temperature, defaults.temperature, 1.0),
            top_p=_first(request.top_p, defaults.top_p, 1.0),
            top_k=max(_first(request.top_k, defaults.top_k, 0), 0),
            min_p=_first(request.min_p, defaults.min_p, 0.0),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(request.logit_bias or {}),
            stop_token_ids=tuple(dict.fromkeys((*(request.stop_token_ids or ()), *ends))),
            ignore_eos=ignore_eos,
            logprobs=request.logprobs_wanted(),
            allowed_token_ids=self._allowed(request.allowed_token_ids or []),
        )

    def _bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words: at the beginning of a text and, where that differs, after a space (as vLLM)."""
        if not words:
            return ()
        bare = self.preparer.prompts.texts([word.lstrip() for word in words], add_special_tokens=False)
        spaced = self.preparer.prompts.texts([" " + word.lstrip() for word in words], add_special_tokens=False)
        found = [tuple(tokens) for tokens in bare]
        found += [tuple(b) for a, b in zip(bare, spaced, strict=True) if a and b and a[0] != b[0] and len(a) == len(b)]
        if not all(found):
            raise BadRequest("bad_words: a word has no tokens", param="bad_words")
        return tuple(dict.fromkeys(found))

    def _allowed(self, tokens: list[int]) -> tuple[int, ...]:
        size = self.preparer.prompts.vocab_size
        if tokens and max(tokens) >= size:
            raise BadRequest(f"token id {max(tokens)} is outside the vocabulary of {size}", param="allowed_token_ids")
        return tuple(sorted(set(tokens)))

    def _logit_bias(self, given: dict[str, float]) -> dict[int, float]:
        out = {}
        for key, bias in given.items():
            if int(key) >= self.preparer.prompts.vocab_size:
                size = self.preparer.prompts.vocab_size
                raise BadRequest(f"{key!r} is not a token id below the vocabulary's {size}", param="logit_bias")
            out[int(key)] = bias
        return out


class _ChatDraft(_Draft[ChatRequest]):
    prefix, part = "chatcmpl-", "messages"

    def __init__(self, preparer: Preparer, request: ChatRequest, origin: Origin) -> None:
        super().__init__(preparer, request, origin)
        self._template = preparer.template(self.profile, origin.tenant, tools=bool(request.usable_tools()))
        self._text = ""  # of the conversation, when a foreign template has rendered it

    async def prepared(self) -> Prepared:
        if not isinstance(self._template, ChatTemplate):
            template = self._template
            messages, how = await self.origin.run(lambda: self._for_rendering(template))
            self._text = await template.render(messages, **how)
        return await super().prepared()

    def _for_rendering(self, template: ForeignTemplate) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The messages for a template that is rendered elsewhere, and how it renders them."""
        self.images, how = self._taken_images(), _how(self.request, template)
        return conversation.read_by(self.request.messages, template), how

    def _prompts(self) -> tuple[list[Prompt], list[list[int]]]:
        request, template, text = self.request, self._template, self._text
        if isinstance(template, ChatTemplate):
            self.images = self._taken_images()
            text = template.render(conversation.read_by(request.messages, template), **_how(request, template))
        tokens = self.preparer.prompts.rendered(
            text, add_special_tokens=bool(request.add_special_tokens), whole=self.profile.whole, longest=self._longest()
        )
        return [""], [self._fitted(tokens)]

    def _taken_images(self) -> list[Image]:
        """The images of a chat. Raises BadRequest or TooLarge naming the part or the field that does not go with it."""
        images = self.request.take_images()
        if not images:
            return images
        if not self._template.takes_images:
            at = images[0].param
            raise BadRequest(f"{at}: this model's chat template has no place for images", param=at)
        for param in ("truncate_prompt_tokens", "prompt_logprobs"):
            if getattr(self.request, param) is not None:
                raise BadRequest(f"{param} is not supported with images", param=param)
        size, most = sum(len(image.data) for image in images), self.preparer.message_bytes() - REQUEST_BYTES
        if size > most:
            at = images[-1].param
            raise TooLarge(f"{at}: the images have {size} bytes together; a request may have {most}", param=at)
        return images

    def _asked_tokens(self) -> int | None:
        request = self.request
        return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens

    def _max_tokens(self, room: int) -> tuple[int, str]:
        param = "max_tokens" if self.request.max_completion_tokens is None else "max_completion_tokens"
        return self._asked_tokens() or min(room, self.profile.defaults.max_new_tokens or room), param

    def _told(self, given: Prompt, prompt: list[int]) -> tuple[str, str, int]:
        messages = self.request.conversation()
        first, text = messages[0], str(messages[-1].get("content") or "")
        system = str(first.get("content") or "") if first.get("role") in ("system", "developer") else ""
        return text, system, len(messages)

    def _parsing(self, prompt: list[int], *, constrained: bool) -> Parsing | None:
        request, options = self.request, self.preparer.config.answers
        tools, choice = request.usable_tools(), request.tool_choice
        thinks = bool(options.reasoning_parser) and request.separate_reasoning is not False
        if not tools and not thinks:
            return None
        if tools and choice in (None, "auto") and not options.tool_call_parser:
            raise BadRequest("tools: this gateway has no --tool-call-parser", param="tools")
        begins_inside = False
        if thinks:
            end = self.preparer.prompts.tokenizer.decode(prompt[-TAG_TOKENS:], skip_special_tokens=False).rstrip()
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

    def _continues_text(self) -> bool:
        return bool(self.request.continue_final_message)


class _CompletionDraft(_Draft[CompletionRequest]):
    prefix, part = "cmpl-", "prompt"

    def _prompts(self) -> tuple[list[Prompt], list[list[int]]]:
        request, preparer = self.request, self.preparer
        given = request.prompts()
        tokenized = iter(
            preparer.prompts.texts(
                [prompt for prompt in given if isinstance(prompt, str)],
                add_special_tokens=request.add_special_tokens is not False,
                whole=self.profile.whole,
                longest=self._longest(),
            )
        )
        prompts = [next(tokenized) if isinstance(prompt, str) else preparer.known(prompt) for prompt in given]
        return given, [self._fitted(tokens) for tokens in prompts]

    def _max_tokens(self, room: int) -> tuple[int, str]:
        asked = self.request.max_tokens
        return min(room, COMPLETION_MAX_TOKENS) if asked is None else max(asked, 1), "max_tokens"  # 0: `Job.silent`

    def _told(self, given: Prompt, prompt: list[int]) -> tuple[str, str, int]:
        text = given if isinstance(given, str) else self.preparer.prompts.tokenizer.decode(prompt[-DECODED_TOKENS:])
        return text, "", 0

    def _echoes(self, given: list[Prompt], prompts: list[list[int]]) -> list[str]:
        if not self.request.echo:
            return super()._echoes(given, prompts)
        whole, text_of = self.request.truncate_prompt_tokens is None, self.preparer.prompts.text
        return [
            text if isinstance(text, str) and whole else text_of(tokens, skip_special_tokens=True)
            for text, tokens in zip(given, prompts, strict=True)
        ]

    def _silent(self) -> bool:
        return self.request.max_tokens == 0


def _check_scored(scored: tuple[str, int], prompt_tokens: int) -> None:
    """Log-probabilities of a prompt come in one message, whose size is limited."""
    field, rivals = scored
    if prompt_tokens * (rivals + 1) > SCORES_MAX:
        raise BadRequest(
            f"{field}: {prompt_tokens} tokens with {rivals} log-probabilities beside their own are more than the"
            f" {SCORES_MAX} that are returned",
            param=field,
        )


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
