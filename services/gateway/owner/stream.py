"""The Owner's interface: a Job goes in, a Stream of Deltas comes out. No HTTP here.

    job = Job(...)                                  one sequence; n choices are n jobs
    stream = await owner.open(job)                  raises Overloaded, Unavailable, ... before anything is streamed
    async for delta in stream: ...                  raises the MotetError that ended it; the last delta has `finish`
    stream.cancel()                                 at any time; the worker is told at once

The Owner pushes tokens in order, the finish or a failure; one caller takes them. The buffer between them is bounded, in tokens
and in bytes: the request of a caller that does not keep up is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from motet.policies.owner.life import Owned
from motet.services.gateway.owner.detokenize import Detokenizer, StopFilter, TextStream
from motet.services.gateway.owner.drawing import Drawing, NoText
from motet.shared.clock import now_s
from motet.shared.errors import MotetError, Overloaded
from motet.shared.model import FinishReason
from motet.shared.wire.request import Work
from motet.shared.wire.stream import Picture, StreamItem, TokenLogprobs

STREAM_BYTES_MAX = 4 << 20  # of deltas that the caller has not taken
TEXT_BYTES, DELTA_BYTES, SCORE_BYTES = 64, 400, 80  # of memory for a token's text, for a delta, for each log-probability in it


class Job(Work, frozen=True, kw_only=True):
    """One sequence to generate, and how the gateway shows it."""

    model: str  # the name the client asked for; for answers and metrics
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # show the stop string or stop token that ended it
    skip_special_tokens: bool = True
    left_out: frozenset[int] = frozenset()  # special tokens of its adapter: left out of the text like the tokenizer's own
    eos_token_ids: tuple[int, ...] = ()  # of its adapter: among the stop tokens, and not told as a reason
    continues_text: bool = False  # the output is glued to the prompt's text: keep a leading space
    silent: bool = False  # the prompt alone is wanted: the one token that an engine must draw is not shown
    timeout_s: float = 600.0
    arrived_s: float = 0.0  # `now_s()` when the client's request came; 0 for when it is opened


class TextDelta(msgspec.Struct, gc=False):
    """Output that became visible at once. `tokens` are the shown tokens of this step. `text` may lag behind them (incomplete
    characters, possible stop strings) and is complete with the last delta, the one with `finish`."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it (never the model's own EOS)
    again: bool = False  # the deltas before are void: the sequence begins again (only where `Stream.retractable`)


class Signal:
    """Wakes the task that serves a group of streams. A `set` before the wait is not lost."""

    __slots__ = ("_raised", "_waiter")

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._raised = False

    def set(self) -> None:
        """Wake the waiting task."""
        waiter = self._waiter
        if waiter is None:
            self._raised = True
        else:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Return as soon as `set` was called since the last wait."""
        if self._raised:
            self._raised = False
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Stream(Owned):
    """An owned request, made by `Owner.open`. The upper half of this class is for the caller, the lower half for the Owner."""

    __slots__ = (
        "_delta_bytes",
        "_detokenizer",
        "_filter",
        "_limit",
        "_on_cancel",
        "_ready",
        "_text",
        "_texts",
        "begun_s",
        "cached_tokens",
        "deadline",
        "drawing",
        "embedding",
        "first_s",
        "job",
        "on_slow",
        "opened_s",
        "prompt_logprobs",
        "prompt_tokens",
        "queue_ms",
        "retractable",
        "signal",
    )
    finish: FinishReason | None
    error: MotetError | None

    def __init__(
        self, job: Job, detokenizer: Detokenizer, on_cancel: Callable[[Stream], None], signal: Signal | None, limit: int
    ) -> None:
        self.opened_s = now_s()
        constrained = job.sampling.structured is not None
        super().__init__(job.request_id, job.sampling.max_tokens, constrained=constrained, now_s=self.opened_s)
        self.job = job
        self.signal = signal or Signal()
        self.begun_s = job.arrived_s or self.opened_s
        self.first_s = 0.0  # when the first token came
        self.cached_tokens = 0
        self.queue_ms = 0.0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.embedding = b""  # little-endian float32
        self.drawing = Drawing(job.image) if job.image is not None else None  # of a picture
        self.prompt_tokens = job.prompt_tokens  # those of images are known with the first token
        self.on_slow: Callable[[], None] | None = None  # for callers that may be stuck in a write
        self.deadline: asyncio.TimerHandle | None = None
        self.retractable = False  # the caller shows nothing before the end, and heeds `Delta.again`
        self._detokenizer = detokenizer
        self._begin()
        self._on_cancel = on_cancel
        self._ready: list[TextDelta] = []  # not taken yet, and after these:
        self._texts: list[str] = []  # the texts of the last tokens, one each, when there is nothing to tell but their text
        self._delta_bytes = (
            DELTA_BYTES if job.sampling.logprobs is None else DELTA_BYTES + SCORE_BYTES * (1 + job.sampling.logprobs)
        )
        self._limit = min(limit, STREAM_BYTES_MAX // self._delta_bytes)

    def _begin(self) -> None:
        job = self.job
        skips = job.skip_special_tokens
        left_out = job.left_out if skips else frozenset[int]()
        if job.image is not None:
            self._text: TextStream = NoText()
        else:
            continues = job.continues_text
            self._text = self._detokenizer.stream(skip_special_tokens=skips, continues_text=continues, left_out=left_out)
        self._filter = StopFilter(job.stop, job.include_stop) if job.stop else None

    # ---- the caller's half

    @property
    def ended(self) -> bool:
        """Whether `take` will return nothing more."""
        return not self._ready and not self._texts and (self.finish is not None or self.error is not None)

    @property
    def unread_bytes(self) -> int:
        """About so much memory have the deltas that are ready and not taken."""
        size = TEXT_BYTES * len(self._texts) + self._delta_bytes * len(self._ready)
        return size + self.drawing.bytes if self._ready and self.drawing is not None else size

    @property
    def picture(self) -> Picture | None:
        """The picture, once it is drawn."""
        return self.drawing.picture if self.drawing is not None else None

    @property
    def previews(self) -> list[Picture]:
        """The previews that have come so far, in their order."""
        return self.drawing.previews if self.drawing is not None else []

    def take(self) -> list[TextDelta]:
        """The deltas that are ready now, possibly none. Raises the MotetError that ended the request."""
        self._fold()
        ready = self._ready
        if ready:
            self._ready = []
        elif self.error is not None:
            raise self.error
        return ready

    def take_texts(self) -> list[str]:
        """The ready texts, one per token; nothing if a ready delta has more than a text, so that `take` must be used."""
        texts = self._texts
        if not texts or self._ready:
            return []
        self._texts = []
        return texts

    def _fold(self) -> None:
        """Turn collected texts into deltas."""
        if texts := self._texts:
            tokens = self.tokens[-len(texts) :]
            self._ready += [TextDelta(text, [token]) for text, token in zip(texts, tokens, strict=True)]
            self._texts = []

    @property
    def answered(self) -> list[int]:
        """The tokens that count as the answer's."""
        return [] if self.job.silent else self.tokens

    def cancel(self) -> None:
        """Cancel the request at its worker and release it. No effect after its end."""
        self._on_cancel(self)

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Iterate deltas up to the one with `finish`. The request is cancelled when the caller stops early."""
        try:
            while not self.ended:
                for delta in self.take():
                    yield delta
                if not self.ended:
                    await self.signal.wait()
            self.take()
        finally:
            self.cancel()

    # ---- the Owner's half

    def push_plain(self, new: list[int]) -> bool:
        """`push` for one token that needs only its text and is not the first: the fast path.

        Returns False when the reader is too slow.
        """
        texts = self._texts
        if len(texts) >= self._limit:
            self.too_slow()
            return False
        self.tokens += new
        texts.append(self._text.push(new))
        self.signal.set()
        return True

    def push(self, new: list[int], item: StreamItem, logprobs: list[TokenLogprobs] | None) -> None:
        """Take in `new`, those tokens of `item` that were not known yet. Sets `finish` when they end the sequence."""
        self._fold()
        tokens = self.tokens
        begun = len(tokens)
        if not tokens and (new or item.embedding):
            self._begun(item)
        tokens += new
        if self.drawing is not None:
            self._push_steps(self.drawing, new, item)
            return
        finish = item.finish
        if self.job.silent:
            self._deliver(TextDelta("", [], None, "length" if finish == "stop" else finish))
            return
        reason: int | str | None = None
        shown = new
        if finish == "stop":
            named = set(self.job.sampling.stop_token_ids).difference(self.job.eos_token_ids)
            reason = item.stop_token if item.stop_token in named else None
            if new and not self.job.include_stop:  # the token that ended it is counted and not shown
                shown, logprobs = new[:-1], logprobs[:-1] if logprobs else None
        free = 0 if self._filter is None else max(0, self.job.sampling.min_tokens - 1 - begun)  # no stop string may end these
        before = self._text.push(shown[:free]) if free else ""
        text = self._text.push(shown[free:])
        if finish is not None:
            text += self._text.finish()
        if self._filter is not None and len(tokens) >= self.job.sampling.min_tokens:
            text, matched = self._filter.push(text)
            if matched is not None:
                finish, reason = "stop", matched
            elif finish is not None:
                text += self._filter.finish()
        self._deliver(TextDelta(before + text, shown, logprobs, finish, reason))
        self.see_plain()

    def _begun(self, item: StreamItem) -> None:
        """Note what the first item says."""
        self.first_s = now_s()
        self.cached_tokens, self.queue_ms = item.cached_tokens, item.queue_ms
        self.prompt_logprobs = item.prompt_logprobs or self.prompt_logprobs
        self.embedding = item.embedding
        self.prompt_tokens = item.prompt_tokens or self.prompt_tokens

    def _push_steps(self, drawing: Drawing, new: list[int], item: StreamItem) -> None:
        """Take in denoising steps. A request that ends without its picture fails.

        Steps that the caller has not taken yet become one delta, so one that waits for the end is not slow.
        """
        drawing.take(item)
        if item.finish == "stop" and drawing.picture is None:
            self.fail(MotetError("its worker has ended the request without a picture"))
            return
        if self._ready:
            self._ready[-1].tokens += new
            self._ready[-1].finish = self.finish = item.finish
            self.signal.set()
        else:
            self._deliver(TextDelta("", list(new), None, item.finish))

    def see_plain(self) -> None:
        """Update `plain`: whether the next tokens need only their text.

        They do not if one is the first, log-probabilities or stop strings are asked for, or early items are held, and for a
        picture never.
        """
        self.plain = bool(self.tokens) and self._filter is None and self.job.sampling.logprobs is None and not self.early
        if self.drawing is not None:
            self.plain = False

    def begin_again(self) -> bool:
        """Forget the output so far; False when the caller has some of it and cannot take it back."""
        taken = len(self.tokens) > len(self._texts) + sum(len(delta.tokens) for delta in self._ready)
        if taken and not self.retractable:
            return False
        self.tokens, self._texts, self._ready = [], [], [TextDelta("", [], again=True)] if taken else []
        self.plain = False
        self._begin()
        return True

    def end(self, finish: FinishReason) -> None:
        """Finish without a new token."""
        self._fold()
        text = self._text.finish()
        if self._filter is not None:
            text, _ = self._filter.push(text)
            text += self._filter.finish()
        self._deliver(TextDelta(text, [], None, finish, None))

    def _deliver(self, delta: TextDelta) -> None:
        self.finish = delta.finish
        if len(self._ready) >= self._limit:
            self.too_slow()
            return
        self._ready.append(delta)
        self.signal.set()

    def too_slow(self) -> None:
        """End the stream because its caller does not take what is ready."""
        self.fail(SlowReader(f"{len(self._texts) + len(self._ready)} tokens were ready and not read"))
        if self.on_slow is not None:
            self.on_slow()

    def fail(self, error: MotetError) -> None:
        """End the stream with `error`, which the caller gets after the deltas that are ready."""
        self.error = error
        self.signal.set()


class SlowReader(Overloaded):
    """The client reads its tokens more slowly than they are generated."""

    code = "slow_reader"
