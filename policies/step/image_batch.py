"""Plans the steps of an image engine: which requests are encoded, denoised one step, or decoded next. Live engine and twin.

    add ──> encode ──> denoise (steps times) ──> decode ──> gone          each arrow is a plan that the engine has carried out
              ▲            any request may sit out any step: between two steps it is its latents and its encoding, a few 100 KiB
              └─ all its adapters have slots

Rules:
1. The requests of a denoising step have one *bucket*: latents of one shape, encodings of one length. Each has its own adapters,
   weights, sampler and number of the step.
2. A step has as many rows as the bucket's *knee* (`times.image_times`) and the memory allow, and always one request. One in
   many may have more, to see whether the knee is still right.
3. The most urgent request is first, and the step is one of its bucket. Urgent is who must *start by* the earliest time: its
   deadline less what it takes alone, as expected when it came, but not before it came. A request without an objective has the
   deadline arrival + `PATIENCE` times its own time. So few steps and few pictures go before many, and nobody is passed by
   requests that come after its `start_by_s`. Pausing is free, and the order of two requests never changes, so they do not
   take turns for nothing. Requests that have begun on another worker go before all others, since they are older than their
   arrival here.
4. The pictures of one prompt count as one request: its own time is that of all of them.
5. Only requests whose adapters all have slots are encoded and denoised. They get them all at once or none (`acquire_all`), so
   no two requests wait for each other. Of a bucket the next requests hold slots: about two steps' rows of them, and as many
   whose adapters are on their way. Copies run beside the steps; a request that waits for one, or for a slot, blocks nobody.
   After `BYPASS_MAX` others got slots instead, it is the next to get them.
6. Between two denoising steps there is at most one encoding and one decoding step, so neither keeps the others waiting.
   Large pictures are decoded one at a time.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from typing import Any, Generic, Literal, TypeVar

from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.times.image_times import Bucket, ImageTimes
from motet.shared.model import Slo

Stage = Literal["encode", "denoise", "decode"]
BYPASS_MAX = 64
PATIENCE = 4.0
"""A request without an objective should be done within so many times the time that it takes alone."""
AHEAD = 2
"""Requests hold slots for so many steps' rows."""


@dataclass(slots=True, eq=False, kw_only=True)
class ImageSequence:
    """A request between two steps. Engines add their tensors in a subclass.

    `rows`: of one request in a step, 2 with guidance. `steps`: that are run, the first of them is number `step`. `adapters`:
    different ones, each digest with its bytes.
    """

    order: int  # of arrival
    bucket: Bucket
    rows: int
    steps: int
    step: int = 0
    adapters: tuple[tuple[str, int], ...] = ()
    resumed: bool = False  # it has begun on another worker
    pictures: int = 1  # of its prompt, which came together
    arrival_s: float = 0.0
    due_s: float = inf  # by its objective; inf for none
    start_by_s: float = 0.0  # at the latest, to be done in time; set by `ImageBatch.add`
    stage: Stage = "encode"
    holds: bool = False  # slots for all its adapters
    passed: int = 0  # requests that got slots while this one could not


S = TypeVar("S", bound=ImageSequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageBatchLimits:
    """Limits of one engine. `rows_most`: the rows of a denoising step that fit the memory, for each bucket."""

    rows_most: Callable[[Bucket], int] = lambda _: 32
    encodes: int = 16  # requests of one encoding step
    decodes: int = 8  # pictures of one decoding step
    large_area: int = 64 * 64  # latents of more positions are decoded one at a time


@dataclass(slots=True)
class ImagePlan(Generic[S]):
    """The next step, to be carried out in this order: evictions (digest, slot), copies (request, digest, slot), then the step.

    Without a stage there is nothing to do but to wait for copies.
    """

    stage: Stage | None = None
    requests: list[S] = field(default_factory=list)
    evictions: list[tuple[str, int]] = field(default_factory=list)
    loads: list[tuple[S, str, int]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """The rows of the step."""
        return sum(one.rows for one in self.requests)


def by_start(seq: ImageSequence) -> Any:
    """Rule 3."""
    return not seq.resumed, seq.start_by_s, seq.order


def due_s(slo: Slo, arrival_s: float) -> float:
    """When a request is due by its objective for the whole answer; inf without one."""
    return arrival_s + slo.e2e_slo_ms / 1000.0 if slo.e2e_slo_ms and not slo.e2e_is_timeout else inf


class ImageBatch(Generic[S]):
    """The requests of one engine. `slots` are asynchronous: `arrived` on them makes an adapter's requests eligible.

    `urgency(request)`: those with a smaller one go first. It is asked once for each, after `start_by_s` is set; other orders
    than Motet's are there to compare with.
    """

    def __init__(
        self,
        limits: ImageBatchLimits,
        *,
        slots: AdapterSlots,
        times: ImageTimes,
        urgency: Callable[[S], Any] = by_start,
    ) -> None:
        self.limits, self.slots, self.times, self._urgency = limits, slots, times, urgency
        self._requests: dict[S, Any] = {}  # with their urgency, in the order in which they came
        self._sizes: Counter[Bucket] = Counter()  # of the requests
        self._holders = 0  # requests that hold slots
        self._drawn: set[S] = set()  # those that are to be decoded
        self._ordered: list[tuple[Any, S]] = []  # by urgency
        self._between: set[Stage] = set()  # steps since the last denoising one

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._requests))

    # ---- requests

    def fits(self, adapters: Iterable[tuple[str, int]]) -> bool:
        """Whether an engine without other requests has slots for all these adapters."""
        sizes = [size_bytes for _, size_bytes in adapters]
        return len(sizes) <= self.slots.slots and sum(sizes) <= self.slots.bytes_total

    def add(self, seq: S) -> None:
        """A new request. Raises ValueError for adapters that never fit."""
        if not self.fits(seq.adapters):
            raise ValueError(f"{len(seq.adapters)} adapters do not fit in {self.slots.slots} slots of the device")
        together = max(1, self.rows_limit(seq.bucket) // seq.rows)
        own_s = self.times.own_ms(seq.bucket, seq.rows, seq.steps - seq.step, pictures=seq.pictures, together=together) / 1e3
        due_s = seq.due_s if seq.due_s < inf else seq.arrival_s + PATIENCE * own_s
        seq.start_by_s = max(seq.arrival_s, due_s - own_s)
        urgency = self._requests[seq] = self._urgency(seq)
        self._sizes[seq.bucket] += 1
        insort(self._ordered, (urgency, seq), key=itemgetter(0))

    def remove(self, seq: S) -> None:
        """A request has ended, failed or was cancelled. Unknown ones are ignored."""
        if seq not in self._requests:
            return
        del self._requests[seq]
        self._drawn.discard(seq)
        self._sizes[seq.bucket] -= 1
        if not self._sizes[seq.bucket]:
            del self._sizes[seq.bucket]
        self._ordered = [one for one in self._ordered if one[1] is not seq]
        self._release(seq)

    def done(self, plan: ImagePlan[S], took_ms: float = 0.0) -> list[S]:
        """The plan was carried out. Returns the requests that have ended by it. `took_ms`: 0 for unknown.

        Requests that were removed meanwhile are ignored.
        """
        ended: list[S] = []
        if plan.stage == "encode" and plan.requests:
            self.times.observe_encode(len(plan.requests), took_ms)
        elif plan.stage == "decode" and plan.requests:
            self.times.observe_decode(plan.requests[0].bucket, len(plan.requests), took_ms)
        elif plan.requests:
            self.times.observe(plan.requests[0].bucket, plan.rows, took_ms)
        for seq in plan.requests:
            if seq not in self._requests:
                continue
            if plan.stage == "decode":
                ended.append(seq)
                self.remove(seq)
                continue
            seq.step += plan.stage == "denoise"
            seq.stage = "denoise" if seq.step < seq.steps else "decode"
            if seq.stage == "decode":
                self._drawn.add(seq)
                self._release(seq)
        return ended

    # ---- plans

    def plan(self, now_s: float) -> ImagePlan[S]:
        """The next step, of requests that are there now. Slots for it are taken at once."""
        plan: ImagePlan[S] = ImagePlan()
        self.slots.eviction.now_s = now_s
        ready = self._eligible(plan)
        encodes = [seq for seq in ready if seq.stage == "encode"]
        denoises = [seq for seq in ready if seq.stage == "denoise"]
        decodes = sorted(self._drawn, key=self._requests.__getitem__)
        if encodes and not (denoises and "encode" in self._between):
            plan.stage, plan.requests = "encode", self._encodes(encodes)
        elif decodes and not (denoises and "decode" in self._between):
            plan.stage, plan.requests = "decode", self._decodes(decodes)
        elif denoises:
            plan.stage, plan.requests = "denoise", self._denoises(denoises)
        if plan.stage == "denoise":
            self._between.clear()
        elif plan.stage is not None:
            self._between.add(plan.stage)
        return plan

    def rows_limit(self, bucket: Bucket) -> int:
        """The rows that a step of this bucket should have: up to the knee, and what the memory holds."""
        return self.times.knee(bucket, max(1, self.limits.rows_most(bucket)))

    def rows_now(self, bucket: Bucket) -> int:
        """The rows that the next step of this bucket may have: from time to time more than it should."""
        return self.times.rows(bucket, max(1, self.limits.rows_most(bucket)))

    def _eligible(self, plan: ImagePlan[S]) -> list[S]:
        """Rule 5: those that can be encoded or denoised now, with slots for those that can be next. They keep the order.

        It ends where no size has room and nobody behind holds slots.
        """
        room: dict[Bucket, list[int]] = {}  # rows of ready requests, and of those that wait for copies, still to be let in
        ready: list[S] = []
        blocked: list[S] = []
        holders, full = self._holders, 0
        for _, seq in self._ordered:
            if not holders and full == len(self._sizes):
                break
            holders -= seq.holds
            if seq.stage == "decode":
                continue
            if seq.bucket not in room:
                room[seq.bucket] = [AHEAD * self.rows_limit(seq.bucket)] * 2
            left = room[seq.bucket]
            if not seq.holds and left[0] <= 0:
                continue
            if seq.adapters and not seq.holds and (left[1] > 0 or self._here(seq)):
                self._take_slots(seq, plan, blocked)
            is_ready = self._here(seq) and (seq.holds or not seq.adapters)
            if is_ready:
                ready.append(seq)
            if seq.holds or is_ready:
                had = left[0]
                left[0 if is_ready else 1] -= seq.rows
                full += had > 0 >= left[0]
        return ready

    def _take_slots(self, seq: S, plan: ImagePlan[S], blocked: list[S]) -> None:
        """Slots for all its adapters, or none; `blocked` are those before it that got none."""
        closed = any(one.passed >= BYPASS_MAX for one in blocked)
        grants = None if closed else self.slots.acquire_all(seq.adapters)
        if grants is None:
            blocked.append(seq)
            return
        seq.holds, seq.passed = True, 0
        self._holders += 1
        for (digest, _), grant in zip(seq.adapters, grants, strict=True):
            plan.evictions += grant.evicted
            if grant.load:
                plan.loads.append((seq, digest, grant.slot))
        for waiting in blocked:
            waiting.passed += 1

    def _here(self, seq: S) -> bool:
        """Whether all its adapters are on the device."""
        slots = self.slots
        return all(digest in slots and digest not in slots.loading for digest, _ in seq.adapters)

    def _encodes(self, ready: list[S]) -> list[S]:
        """Requests with prompts of one length."""
        length = ready[0].bucket.text_tokens
        return [seq for seq in ready if seq.bucket.text_tokens == length][: self.limits.encodes]

    def _decodes(self, drawn: list[S]) -> list[S]:
        """Pictures of one size; large ones one at a time."""
        bucket = drawn[0].bucket
        if bucket.area > self.limits.large_area:
            return drawn[:1]
        shape = bucket[:3]
        return [seq for seq in drawn if seq.bucket[:3] == shape][: self.limits.decodes]

    def _denoises(self, ready: list[S]) -> list[S]:
        """Rules 1 to 3."""
        bucket = ready[0].bucket
        chosen: list[S] = []
        left = self.rows_now(bucket)
        for seq in ready:
            if seq.bucket == bucket and (seq.rows <= left or not chosen):
                chosen.append(seq)
                left -= seq.rows
        return chosen

    def _release(self, seq: S) -> None:
        if seq.holds:
            for digest, _ in seq.adapters:
                self.slots.release(digest)
            seq.holds = False
            self._holders -= 1

    def check(self) -> None:
        """Assert that slots and stages agree (tests)."""
        users: dict[str, int] = {}
        for seq in self._requests:
            for digest, _ in seq.adapters if seq.holds else ():
                users[digest] = users.get(digest, 0) + 1
            assert 0 <= seq.step <= seq.steps and (seq.step < seq.steps or seq.stage != "denoise"), seq
            assert not (seq.holds and seq.stage == "decode"), "it needs no adapters any more"
        assert self._holders == sum(seq.holds for seq in self._requests), "holders"
        assert self._drawn == {seq for seq in self._requests if seq.stage == "decode"}, "those to be decoded"
        assert self._sizes == Counter(seq.bucket for seq in self._requests), "sizes"
        self.slots.check(users)
