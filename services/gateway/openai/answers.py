"""Makes OpenAI's answers (`schemas`): complete ones, and the parts that streamed chunks share with them. No HTTP here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import UNSET

from motet.policies.tenant_shares import Part
from motet.services.gateway.openai import schemas
from motet.services.gateway.openai.output_parsers import AnswerParser
from motet.services.gateway.openai.texts import Prepared
from motet.services.gateway.owner.detokenize import Detokenizer
from motet.services.gateway.owner.encoding import Breath, Rows, hold
from motet.services.gateway.owner.made_by import Answer
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.stream import Job, Signal, Stream, TextDelta
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import TokenLogprobs

OnDelta = Callable[[int, TextDelta], Awaitable[None]]
MIN_LOGPROB = -9999.0  # JSON has no infinity
SCORE_BYTES = 64  # of memory for a log-probability that is kept until its answer is complete


async def open_all(owner: Owner, jobs: list[Job], *, early: bool = False) -> tuple[list[Stream], Signal]:
    """Open all choices of a request, with one signal (`Owner.open`). When one is refused, the others are cancelled."""
    signal = Signal()
    if len(jobs) == 1:
        return [await owner.open(jobs[0], signal=signal, early=early)], signal
    opening = [asyncio.ensure_future(owner.open(job, signal=signal, early=early)) for job in jobs]
    try:
        return list(await asyncio.gather(*opening)), signal
    except BaseException:
        for task in opening:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().cancel()
            else:
                task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        raise


async def collect(owner: Owner, prepared: Prepared, held: Part, *, on_delta: OnDelta | None = None) -> Answer:
    """Run a request to its end and return the whole OpenAI answer. `on_delta(choice, delta)` is awaited for each delta.

    Raises the MotetError of the first choice that fails; the others are cancelled then.
    """
    streams, signal = await open_all(owner, prepared.jobs)
    for stream in streams:
        stream.retractable = on_delta is None
    gathered = [_Gathered(echo) for echo in prepared.echoes]
    running = set(range(len(streams)))
    try:
        while True:
            for i in list(running):
                for delta in streams[i].take():
                    gathered[i].add(delta)
                    if delta.logprobs:
                        hold(held, SCORE_BYTES * sum(1 + len(scores.top_ids) for scores in delta.logprobs))
                    if on_delta is not None:
                        await on_delta(i, delta)
                if streams[i].ended:
                    streams[i].take()  # raises what ended it
                    running.discard(i)
            if not running:
                break
            await signal.wait()
    finally:
        for stream in streams:
            stream.cancel()
    choices, breath = list[Any](), Breath()
    for i, one in enumerate(gathered):
        choices.append(one.choice(prepared, streams[i], i, owner.detokenizer))
        await breath.take()
    made_by, used = owner.made_by(streams[0]), usage(prepared, streams)
    told = _of_prompt(prepared, streams[0], owner.detokenizer) if prepared.chat else {}  # a text's choices have it
    kind: type[schemas.ChatCompletion | schemas.Completion] = schemas.ChatCompletion if prepared.chat else schemas.Completion
    body = kind(
        id=prepared.request_id,
        created=prepared.created_s,
        model=prepared.model,
        system_fingerprint=made_by.fingerprint,
        choices=choices,
        usage=used,
        **told,
    )
    return Answer(body, made_by, used.completion_tokens)


class _Gathered:
    """The text, tokens and log-probabilities of one choice so far."""

    def __init__(self, echo: str) -> None:
        self.echo = echo
        self._begin()

    def _begin(self) -> None:
        self.texts = [self.echo]
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.last: TextDelta | None = None

    def add(self, delta: TextDelta) -> None:
        if delta.again:
            self._begin()
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.last = delta

    def choice(
        self, prepared: Prepared, stream: Stream, index: int, detokenizer: Detokenizer
    ) -> schemas.ChatChoice | schemas.TextChoice:
        """The choice that was gathered."""
        assert self.last is not None
        text = "".join(self.texts)
        finish: Any = self.last.finish
        told: dict[str, Any] = {"index": index, "stop_reason": self.last.stop_reason}
        if prepared.request.return_token_ids:
            told["token_ids"] = stream.answered
        wanted = prepared.jobs[index].sampling.logprobs is not None
        if not prepared.chat:
            scores = self._text_logprobs(prepared, stream, index, detokenizer) if wanted else None
            told |= _of_prompt(prepared, stream, detokenizer)
            return schemas.TextChoice(text=text, logprobs=scores, finish_reason=finish, **told)
        shown = schemas.ChatMessage(content=text)
        if prepared.parsing is not None:
            parser = prepared.parsing.open()
            shown, finish = message(parser, text), parser.finish(finish)
        named = chat_logprobs(prepared, detokenizer, self.tokens, self.logprobs) if wanted else None
        return schemas.ChatChoice(message=shown, logprobs=named, finish_reason=finish, **told)

    def _text_logprobs(self, prepared: Prepared, stream: Stream, index: int, detokenizer: Detokenizer) -> schemas.TextLogprobs:
        tokens, scores = self.tokens, list[TokenLogprobs | None](self.logprobs)
        if prepared.echoes[index]:  # the prompt's come first
            tokens = unpack_tokens(stream.job.prompt) + tokens
            scores = (stream.prompt_logprobs or [None] * stream.job.prompt_tokens) + scores
        return text_logprobs(prepared, detokenizer, tokens, scores)


def message(parser: AnswerParser, text: str) -> schemas.ChatMessage:
    """The assistant's message that the whole `text` is."""
    parts = parser.push(text, last=True)
    return schemas.ChatMessage(
        content=parts.content or (None if parts.calls else ""),
        reasoning=parts.reasoning or UNSET,
        tool_calls=[schemas.ToolCall(id=parser.new_id(), function=call) for call in parts.calls] or UNSET,
    )


def _of_prompt(prepared: Prepared, stream: Stream, detokenizer: Detokenizer) -> dict[str, Any]:
    """What a whole answer tells of a prompt: `return_token_ids`, and `prompt_logprobs` in vLLM's shape."""
    request, told = prepared.request, dict[str, Any]()
    if request.return_token_ids:
        told["prompt_token_ids"] = unpack_tokens(stream.job.prompt)
    if request.prompt_logprobs is not None:
        prompt, known = unpack_tokens(stream.job.prompt), stream.prompt_logprobs or []
        told["prompt_logprobs"] = _scored_rows(detokenizer, prompt, known, request.prompt_logprobs)
    return told


def _scored_rows(
    detokenizer: Detokenizer, prompt: list[int], known: list[TokenLogprobs | None], rivals: int
) -> Rows[dict[str, schemas.PromptLogprob] | None]:
    def make(begin: int, end: int) -> list[dict[str, schemas.PromptLogprob] | None]:
        return [_scored(detokenizer, t, lp, rivals) for t, lp in zip(prompt[begin:end], known[begin:end], strict=True)]

    return Rows(min(len(prompt), len(known)), make)


def _scored(
    detokenizer: Detokenizer, token: int, logprobs: TokenLogprobs | None, rivals: int
) -> dict[str, schemas.PromptLogprob] | None:
    if logprobs is None:
        return None
    ranks = {one: rank for rank, one in enumerate(logprobs.top_ids, 1)}
    known = {token: logprobs.logprob} | dict(zip(logprobs.top_ids[:rivals], logprobs.top_logprobs, strict=False))
    return {
        str(one): schemas.PromptLogprob(
            logprob=_finite(logprob), rank=ranks.get(one), decoded_token=detokenizer.token_text(one)
        )
        for one, logprob in known.items()
    }


def usage(prepared: Prepared, streams: list[Stream]) -> schemas.Usage:
    """Token counts of the whole request so far, as OpenAI reports them."""
    completion = sum(len(stream.answered) for stream in streams)
    cached = max((stream.cached_tokens for stream in streams), default=0)
    prompt = sum(stream.prompt_tokens for stream in streams[:: prepared.request.n or 1])
    return schemas.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=schemas.CachedTokens(cached_tokens=cached) if cached else UNSET,
    )


def chunk(prepared: Prepared, choices: list[Any], **more: Any) -> schemas.ChatChunk | schemas.TextChunk:
    """A streamed chunk with these choices. `more`: those of its other fields that are sent."""
    kind: type[schemas.ChatChunk | schemas.TextChunk] = schemas.ChatChunk if prepared.chat else schemas.TextChunk
    return kind(id=prepared.request_id, created=prepared.created_s, model=prepared.model, choices=choices, **more)


def live_chunk(
    prepared: Prepared, choice: int, delta: TextDelta, parser: AnswerParser | None = None
) -> schemas.ChatChunk | schemas.TextChunk:
    """A delta as the streamed chunk that OpenAI clients know, without log-probabilities. `parser`: the choice's own."""
    finish: Any = delta.finish
    if not prepared.chat:
        return chunk(prepared, [schemas.TextChunkChoice(index=choice, text=delta.text, finish_reason=finish)])
    grown = schemas.Delta(content=delta.text)
    if parser is not None:
        grown = parser.delta(delta.text, last=finish is not None)
        finish = finish and parser.finish(finish)
    return chunk(prepared, [schemas.ChatChunkChoice(index=choice, delta=grown, finish_reason=finish)])


def chat_logprobs(
    prepared: Prepared, detokenizer: Detokenizer, tokens: list[int], logprobs: Sequence[TokenLogprobs]
) -> schemas.ChatLogprobs:
    """Log-probabilities of a chat, made while they are encoded."""
    rivals = prepared.jobs[0].sampling.logprobs or 0

    def content(begin: int, end: int) -> list[schemas.TokenLogprob]:
        pairs = zip(tokens[begin:end], logprobs[begin:end], strict=False)
        return [_chat_token(detokenizer, token, lp, rivals) for token, lp in pairs]

    return schemas.ChatLogprobs(content=Rows(min(len(tokens), len(logprobs)), content))


def text_logprobs(
    prepared: Prepared, detokenizer: Detokenizer, tokens: list[int], logprobs: Sequence[TokenLogprobs | None], offset: int = 0
) -> schemas.TextLogprobs:
    """Log-probabilities of a completion, made while they are encoded. `offset`: where the text of the first token begins."""
    rivals, name_of = prepared.jobs[0].sampling.logprobs or 0, detokenizer.token_text

    def offsets(begin: int, end: int) -> list[int]:
        nonlocal offset
        found = []
        for token in tokens[begin:end]:
            found.append(offset)
            offset += len(name_of(token))
        return found

    def names(begin: int, end: int) -> list[str]:
        return [name_of(token) for token in tokens[begin:end]]

    def scores(begin: int, end: int) -> list[float | None]:
        return [None if lp is None else _finite(lp.logprob) for lp in logprobs[begin:end]]

    def tops(begin: int, end: int) -> list[dict[str, float] | None]:
        return [
            None
            if lp is None
            else {name_of(t): _finite(p) for t, p in zip(lp.top_ids[:rivals], lp.top_logprobs, strict=False)}
            | {name_of(token): _finite(lp.logprob)}
            for token, lp in zip(tokens[begin:end], logprobs[begin:end], strict=False)
        ]

    return schemas.TextLogprobs(
        text_offset=Rows(len(tokens), offsets),
        token_logprobs=Rows(len(logprobs), scores),
        tokens=Rows(len(tokens), names),
        top_logprobs=Rows(min(len(tokens), len(logprobs)), tops) if rivals else None,
    )


def _chat_token(detokenizer: Detokenizer, token: int, logprobs: TokenLogprobs, rivals: int) -> schemas.TokenLogprob:
    top = zip(logprobs.top_ids[:rivals], logprobs.top_logprobs, strict=False)
    return schemas.TokenLogprob(
        token=detokenizer.token_text(token),
        logprob=_finite(logprobs.logprob),
        bytes=list(detokenizer.token_bytes(token)),
        top_logprobs=[_named(detokenizer, t, p) for t, p in top],
    )


def _named(detokenizer: Detokenizer, token: int, logprob: float) -> schemas.NamedLogprob:
    return schemas.NamedLogprob(
        token=detokenizer.token_text(token), logprob=_finite(logprob), bytes=list(detokenizer.token_bytes(token))
    )


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
