"""Streams answers as server-sent events. This is a hot path: a token costs one JSON string and one join.

The other fields of a chunk never change within a choice, so they are encoded once per request; per token only the text is
encoded. All tokens that are ready when the task wakes are sent in one write, each as its own event.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
import orjson
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motet.services.gateway.edge.http import SERVER_SEND
from motet.services.gateway.openai import answers
from motet.services.gateway.openai.schemas import ChatChunkChoice, ChatLogprobs, Delta, TextChunkChoice, TextLogprobs, Usage
from motet.services.gateway.openai.texts import Prepared
from motet.services.gateway.owner.detokenize import Detokenizer
from motet.services.gateway.owner.encoding import encoded_at_once
from motet.services.gateway.owner.made_by import MadeBy
from motet.services.gateway.owner.stream import Signal, Stream, TextDelta
from motet.shared.errors import MotetError
from motet.shared.wire.request import unpack_tokens
from motet.shared.wire.stream import TokenLogprobs

GRACE_S = 30.0
KEEP_ALIVE_S = 10.0  # proxies and clients give up on connections that stay silent; a prefill or a queue can be
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which every client of server-sent events skips
DONE = b"data: [DONE]\n\n"
_MARK = "\x00text\x00"
_NOTHING = Delta()


class EventStream(Response):
    """Serves the streams of one request and cancels them when it ends for any reason. Subclasses say what is sent."""

    _error_begins = b"data: "

    def __init__(self, streams: list[Stream], signal: Signal, made_by: MadeBy) -> None:
        super().__init__(status_code=200, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        del self.headers["content-length"]
        self.headers.update(made_by.headers)
        self._streams, self._signal = streams, signal
        self._gone = False
        self._sent = self._due = False  # something since the last beat; a keep-alive comment

    def _opening(self) -> list[bytes]:
        """What comes before all streams."""
        return []

    def _news(self, i: int, stream: Stream, parts: list[bytes]) -> None:
        """Add to `parts` what stream i has to tell now. Raises the MotetError that it ends with."""
        raise NotImplementedError

    def _ended(self, i: int, stream: Stream, parts: list[bytes]) -> None:
        """Add to `parts` what stream i has to tell at its end. Raises a MotetError."""

    def _closing(self) -> list[bytes]:
        """What comes when all streams have ended well."""
        return []

    async def _pump(self, send: Send) -> None:
        parts = self._opening()
        running = list(range(len(self._streams)))
        while True:
            try:
                for i in list(running):
                    stream = self._streams[i]
                    self._news(i, stream, parts)
                    if stream.ended:
                        stream.take()  # raises what ended it
                        self._ended(i, stream, parts)
                        running.remove(i)
            except MotetError as error:
                parts += (self._error_begins, encoded_at_once(error.openai()), b"\n\n", DONE)
                break
            if not running:
                parts += self._closing()
                parts.append(DONE)
                break
            if not parts and self._due:
                parts.append(KEEP_ALIVE)
            if parts:
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
                parts = []
                self._sent, self._due = True, False
            await self._signal.wait()
        await send({"type": "http.response.body", "body": b"".join(parts), "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        # a task of its own and the server's own `send`: no token passes through the framework's twenty frames
        pump = loop.create_task(self._pump(scope.get(SERVER_SEND, send)))
        listener = loop.create_task(self._listen(receive, pump))
        # a client that reads nothing at all holds its last chunks no longer than a request may live
        limit = loop.call_later(self._streams[0].job.timeout_s + GRACE_S, self._cut, pump)
        self._beat_later(loop)
        for stream in self._streams:
            stream.on_slow = functools.partial(self._cut, pump)
        try:
            await pump
        except asyncio.CancelledError:
            if not self._gone:
                raise
        finally:
            listener.cancel()
            self._beating.cancel()
            limit.cancel()
            for stream in self._streams:
                stream.cancel()

    def _beat_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sent = False
        self._beating = loop.call_later(KEEP_ALIVE_S, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the pump for a keep-alive when nothing was sent since the last beat."""
        if not self._sent:
            self._due = True
            self._signal.set()
        self._beat_later(loop)

    async def _listen(self, receive: Receive, pump: asyncio.Task[Any]) -> None:
        """Cancel all streams when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        for stream in self._streams:
            stream.cancel()
        self._cut(pump)

    def _cut(self, pump: asyncio.Task[Any]) -> None:
        """End without a final event; the server closes the connection of an unfinished answer."""
        self._gone = True
        pump.cancel()


class SseResponse(EventStream):
    """The texts of one request."""

    def __init__(
        self, prepared: Prepared, streams: list[Stream], signal: Signal, detokenizer: Detokenizer, made_by: MadeBy
    ) -> None:
        super().__init__(streams, signal, made_by)
        self._head = answers.chunk(prepared, [], system_fingerprint=made_by.fingerprint)  # of every chunk
        self._prepared, self._detokenizer = prepared, detokenizer
        options = prepared.request.stream_options
        self._usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.continuous_usage_stats) and self._usage
        self._logprobs = prepared.jobs[0].sampling.logprobs is not None
        self._token_ids = bool(prepared.request.return_token_ids)
        self._parsers = [prepared.parsing.open() for _ in streams] if prepared.parsing is not None else []
        self._plain = not (self._logprobs or self._running_usage or self._token_ids or self._parsers)
        self._told = [0] * len(streams)  # token ids that events have shown
        self._frames = [self._frame(i) for i in range(len(streams))]
        self._offsets = [len(echo) for echo in prepared.echoes]

    def _news(self, i: int, stream: Stream, parts: list[bytes]) -> None:
        if self._plain and (texts := stream.take_texts()):
            parts += self._quick(i, texts)
            return
        for delta in stream.take():
            if self._plain and delta.finish is None:
                parts += self._quick(i, [delta.text])
            elif event := self._full(i, delta):
                parts.append(event)

    def _closing(self) -> list[bytes]:
        return [self._event([], answers.usage(self._prepared, self._streams))] if self._usage else []

    def _opening(self) -> list[bytes]:
        """Roles (chat) or echoed prompts (completions)."""
        parts: list[bytes] = []
        said: Any
        for i, echo in enumerate(self._prepared.echoes):
            prompt = unpack_tokens(self._prepared.jobs[i].prompt) if self._token_ids else UNSET
            if self._prepared.chat:
                said = ChatChunkChoice(index=i, delta=Delta(role="assistant", content=""))
                parts.append(self._event([said], self._usage_so_far(), prompt_token_ids=prompt))
            elif echo or prompt is not UNSET:
                said = TextChunkChoice(index=i, text=echo, prompt_token_ids=prompt)
                parts.append(self._event([said], self._usage_so_far()))
        return parts

    def _event(self, choices: list[Any], usage: Usage | UnsetType | None, **more: Any) -> bytes:
        body = msgspec.structs.replace(self._head, choices=choices, usage=usage, **more)
        return b"data: " + encoded_at_once(body) + b"\n\n"

    def _usage_so_far(self) -> Usage | UnsetType | None:
        """The field `usage` of every chunk but the last."""
        if not self._usage:
            return UNSET
        return answers.usage(self._prepared, self._streams) if self._running_usage else None

    def _frame(self, choice: int) -> tuple[bytes, bytes, bytes]:
        """The encoded bytes before, between and after the texts of unfinished chunks."""
        if self._prepared.chat:
            marked: Any = ChatChunkChoice(index=choice, delta=Delta(content=_MARK))
        else:
            marked = TextChunkChoice(index=choice, text=_MARK)
        before, after = self._event([marked], self._usage_so_far()).split(orjson.dumps(_MARK))
        return before, after + before, after

    def _quick(self, i: int, texts: list[str]) -> tuple[bytes, ...]:
        """Chunks with nothing but a text, one per text; a text is empty while a character is incomplete."""
        encoded = [orjson.dumps(text) for text in texts if text]
        if not encoded:
            return ()
        before, between, after = self._frames[i]
        return before, between.join(encoded), after

    def _full(self, i: int, delta: TextDelta) -> bytes:
        """Encodes any other chunk: the last one, and chunks with log-probabilities, running usage, tool calls or reasoning.

        Returns nothing while it is undecided which kind of text it is.
        """
        finish: Any = delta.finish
        stop_reason = UNSET if finish is None else delta.stop_reason
        grown = Delta(content=delta.text) if delta.text or not finish else _NOTHING
        if self._parsers:
            grown = self._parsers[i].delta(delta.text, last=finish is not None)
            if grown == _NOTHING and not (finish or self._logprobs or self._token_ids):
                return b""
            finish = finish and self._parsers[i].finish(finish)
        logprobs: Any = self._logprobs_of(i, delta.tokens, delta.logprobs) if delta.logprobs else None
        tokens = self._new_tokens(i, delta) if self._token_ids else UNSET
        if self._prepared.chat:
            choice: Any = ChatChunkChoice(
                index=i, delta=grown, logprobs=logprobs, token_ids=tokens, finish_reason=finish, stop_reason=stop_reason
            )
        else:
            choice = TextChunkChoice(
                index=i, text=delta.text, logprobs=logprobs, token_ids=tokens, finish_reason=finish, stop_reason=stop_reason
            )
        return self._event([choice], self._usage_so_far())

    def _new_tokens(self, i: int, delta: TextDelta) -> list[int]:
        """Token ids that no event has shown. The last delta hides the token that ended the text; the others show all theirs."""
        begin, stream = self._told[i], self._streams[i]
        self._told[i] = len(stream.answered) if delta.finish else begin + len(delta.tokens)
        return stream.answered[begin : self._told[i]]

    def _logprobs_of(self, i: int, tokens: list[int], logprobs: list[TokenLogprobs]) -> ChatLogprobs | TextLogprobs:
        if self._prepared.chat:
            return answers.chat_logprobs(self._prepared, self._detokenizer, tokens, logprobs)
        told = answers.text_logprobs(self._prepared, self._detokenizer, tokens, logprobs, self._offsets[i])
        self._offsets[i] += sum(len(self._detokenizer.token_text(token)) for token in tokens)
        return told
