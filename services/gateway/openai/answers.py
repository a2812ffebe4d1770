"""OpenAI's answer bodies: complete ones, and the parts that streamed chunks share with them. No HTTP here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from motet.policies.tenant_shares import Part
from motet.services.gateway.openai.output_parsers import AnswerParser
from motet.services.gateway.openai.texts import Prepared
from motet.services.gateway.owner.detokenize import Detokenizer
from motet.services.gateway.owner.encoding import Breath, Rows, hold
from motet.services.gateway.owner.made_by import Answer
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.stream import Signal, Stream, TextDelta
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import TokenLogprobs

OnDelta = Callable[[int, TextDelta], Awaitable[None]]
MIN_LOGPROB = -9999.0  # JSON has no infinity
SCORE_BYTES = 64  # of memory for a log-probability that is kept until its answer is complete


async def open_all(owner: Owner, prepared: Prepared) -> tuple[list[Stream], Signal]:
    """Open all choices of a request, with one signal. When one is refused, the others are cancelled."""
    signal = Signal()
    if len(prepared.jobs) == 1:
        return [await owner.open(prepared.jobs[0], signal=signal)], signal
    opening = [asyncio.ensure_future(owner.open(job, signal=signal)) for job in prepared.jobs]
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
    streams, signal = await open_all(owner, prepared)
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
    made_by = owner.made_by(streams[0])
    choices, breath = list[dict[str, Any]](), Breath()
    for i, one in enumerate(gathered):
        choices.append(one.choice(prepared, streams[i], i, owner.detokenizer))
        await breath.take()
    body = {
        "id": prepared.request_id,
        "object": "chat.completion" if prepared.chat else "text_completion",
        "created": prepared.created_s,
        "model": prepared.model,
        "system_fingerprint": made_by.fingerprint,
        "choices": choices,
        "usage": usage(prepared, streams),
    }
    if prepared.request.return_token_ids:
        add_token_ids(prepared, body, streams)
    if prepared.request.prompt_logprobs is not None:
        add_prompt_logprobs(prepared, body, streams, owner.detokenizer)
    return Answer(body, made_by)


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

    def choice(self, prepared: Prepared, stream: Stream, index: int, detokenizer: Detokenizer) -> dict[str, Any]:
        assert self.last is not None
        text = "".join(self.texts)
        wanted = prepared.jobs[index].sampling.logprobs is not None
        tokens, scores = self.tokens, list[TokenLogprobs | None](self.logprobs)
        if wanted and not prepared.chat and prepared.echoes[index]:  # the prompt's come first
            tokens = unpack_tokens(stream.job.prompt) + tokens
            scores = (stream.prompt_logprobs or [None] * stream.job.prompt_tokens) + scores
        logprobs = logprob_rows(prepared, detokenizer, tokens, scores) if wanted else None
        finish: str = self.last.finish or ""
        body: dict[str, Any] = {"index": index}
        if prepared.parsing is not None:
            parser = prepared.parsing.open()
            body["message"] = message(parser, text)
            finish = parser.finish(finish)
        else:
            body |= {"message": {"role": "assistant", "content": text}} if prepared.chat else {"text": text}
        return body | {"logprobs": logprobs, "finish_reason": finish, "stop_reason": self.last.stop_reason}


def message(parser: AnswerParser, text: str) -> dict[str, Any]:
    """The assistant's message that the whole `text` is."""
    parts = parser.push(text, last=True)
    body: dict[str, Any] = {"role": "assistant", "content": parts.content or (None if parts.calls else "")}
    if parts.reasoning:
        body["reasoning"] = parts.reasoning
    if parts.calls:
        body["tool_calls"] = [parser.body_of(call) for call in parts.calls]
    return body


def add_token_ids(prepared: Prepared, body: dict[str, Any], streams: list[Stream]) -> None:
    """Add `return_token_ids` to a whole answer: the tokens of each choice, ending tokens included, and of the prompts."""
    for choice, stream in zip(body["choices"], streams, strict=True):
        choice["token_ids"] = stream.answered
        if not prepared.chat:
            choice["prompt_token_ids"] = unpack_tokens(stream.job.prompt)
    if prepared.chat:
        body["prompt_token_ids"] = unpack_tokens(prepared.jobs[0].prompt)


def add_prompt_logprobs(prepared: Prepared, body: dict[str, Any], streams: list[Stream], detokenizer: Detokenizer) -> None:
    """Add `prompt_logprobs` to a whole answer, in vLLM's shape: for each prompt token a map from token id to its
    log-probability and rank.
    """
    rivals = prepared.request.prompt_logprobs or 0
    for stream, choice in zip(streams, body["choices"], strict=True):
        known = stream.prompt_logprobs or []
        told = _scored_rows(detokenizer, unpack_tokens(stream.job.prompt), known, rivals)
        if prepared.chat:
            body["prompt_logprobs"] = told
            return
        choice["prompt_logprobs"] = told


def _scored_rows(detokenizer: Detokenizer, prompt: list[int], known: list[TokenLogprobs | None], rivals: int) -> Rows:
    def make(begin: int, end: int) -> list[Any]:
        return [_scored(detokenizer, t, lp, rivals) for t, lp in zip(prompt[begin:end], known[begin:end], strict=True)]

    return Rows(min(len(prompt), len(known)), make)


def _scored(detokenizer: Detokenizer, token: int, logprobs: TokenLogprobs | None, rivals: int) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    ranks = {one: rank for rank, one in enumerate(logprobs.top_ids, 1)}
    known = {token: logprobs.logprob} | dict(zip(logprobs.top_ids[:rivals], logprobs.top_logprobs, strict=False))
    return {
        str(one): {"logprob": _finite(logprob), "rank": ranks.get(one), "decoded_token": detokenizer.token_text(one)}
        for one, logprob in known.items()
    }


def usage(prepared: Prepared, streams: list[Stream]) -> dict[str, Any]:
    """Token counts of the whole request so far, as OpenAI reports them."""
    completion = sum(len(stream.answered) for stream in streams)
    cached = max((stream.cached_tokens for stream in streams), default=0)
    prompt = sum(stream.prompt_tokens for stream in streams[:: prepared.request.n or 1])
    body: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached:
        body["prompt_tokens_details"] = {"cached_tokens": cached}
    return body


def head(prepared: Prepared) -> dict[str, Any]:
    """The fields that all streamed chunks of an answer share."""
    return {
        "id": prepared.request_id,
        "object": "chat.completion.chunk" if prepared.chat else "text_completion",
        "created": prepared.created_s,
        "model": prepared.model,
    }


def chunk(prepared: Prepared, choice: int, delta: TextDelta, parser: AnswerParser | None = None) -> dict[str, Any]:
    """A delta as the streamed chunk that OpenAI clients know, without log-probabilities. `parser`: the choice's own."""
    body: dict[str, Any] = {"index": choice}
    finish: str | None = delta.finish
    if parser is not None:
        body["delta"] = parser.delta(delta.text, last=finish is not None)
        finish = finish and parser.finish(finish)
    else:
        body |= {"delta": {"content": delta.text}} if prepared.chat else {"text": delta.text}
    return head(prepared) | {"choices": [body | {"logprobs": None, "finish_reason": finish}]}


def logprobs_body(
    prepared: Prepared, detokenizer: Detokenizer, tokens: list[int], logprobs: Sequence[TokenLogprobs | None], offset: int
) -> dict[str, Any]:
    """Log-probabilities in the shape of the endpoint. `offset`: where the text of the first token begins (completions)."""
    rows = logprob_rows(prepared, detokenizer, tokens, logprobs, offset)
    return {name: column and column.make(0, column.count) for name, column in rows.items()}


def logprob_rows(
    prepared: Prepared, detokenizer: Detokenizer, tokens: list[int], logprobs: Sequence[TokenLogprobs | None], offset: int = 0
) -> dict[str, Rows | None]:
    """The same, with arrays that are made while they are encoded."""
    rivals, name_of = prepared.jobs[0].sampling.logprobs or 0, detokenizer.token_text

    def pairs(begin: int, end: int) -> Iterator[tuple[int, TokenLogprobs | None]]:
        return zip(tokens[begin:end], logprobs[begin:end], strict=False)

    def content(begin: int, end: int) -> list[Any]:
        return [_chat_token(detokenizer, token, lp, rivals) for token, lp in pairs(begin, end) if lp is not None]

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
            for token, lp in pairs(begin, end)
        ]

    if prepared.chat:
        return {"content": Rows(min(len(tokens), len(logprobs)), content)}
    return {
        "text_offset": Rows(len(tokens), offsets),
        "token_logprobs": Rows(len(logprobs), scores),
        "tokens": Rows(len(tokens), names),
        "top_logprobs": Rows(min(len(tokens), len(logprobs)), tops) if rivals else None,
    }


def _chat_token(detokenizer: Detokenizer, token: int, logprobs: TokenLogprobs, rivals: int) -> dict[str, Any]:
    top = zip(logprobs.top_ids[:rivals], logprobs.top_logprobs, strict=False)
    return _named(detokenizer, token, logprobs.logprob) | {"top_logprobs": [_named(detokenizer, t, p) for t, p in top]}


def _named(detokenizer: Detokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": detokenizer.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(detokenizer.token_bytes(token)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
