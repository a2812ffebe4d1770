"""Keeps each request of a gateway alive from its submission to its last token, across worker failures: the pure half.

    submitted ──Submit──> scheduler ──assign──> worker ──frames──> frame ──> Owned.push
                  ▲                                │
                  └── resume: epoch + 1, prompt + tokens so far ── worker lost, gap, retriable error, forgotten

Rules:
1. An item of a frame counts only with the current epoch and from the worker that has the request. Any other item is answered
   with a CancelAt to its sender, at most once per `STRAY_EVERY_S` and request.
2. Token i has index i over all epochs. Known tokens are dropped. Early tokens wait `GAP_S` for the missing ones; then the
   request is resumed.
3. An epoch is submitted once. If the answer is lost, a worker may have the request, so the next attempt is the next epoch.
   Frames that arrive before the answer, or instead of it, count as the answer.
4. A scheduler may ask for a move: the request is submitted again, in the next epoch, for the worker that it names. This is no
   loss.
5. A request whose output is constrained to a grammar goes on where a worker can follow the grammar from the middle of an
   output. Without such a worker it starts again without the tokens so far, or is ended.
6. A request that loses `LOSSES_MAX` workers in a row without a new token is ended: it may be what kills them.
7. A new request that finds no worker is parked while one starts: it is submitted again when that one serves, and not before,
   for at most `park_s`. Then it also waits for room, since requests that came first are not refused for those that came with
   them.

`life.TRANSITIONS` are the phases. The live gateway (services/gateway/owner/owner.py) and the twin's run this code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from motet.policies.owner.events import (
    Action,
    Answered,
    CancelAt,
    Cancelled,
    Ended,
    Event,
    MoveAsked,
    Newcomer,
    Over,
    Parked,
    Pause,
    PauseOver,
    Placed,
    Refused,
    Regained,
    Submit,
    Submitted,
    Tick,
    Told,
    Trouble,
    Why,
    WorkerGone,
)
from motet.policies.owner.life import Item, Owned, Search

SUBMIT_TIMEOUT_S = (1.0, 5.0)  # first, then twice as long each time: a scheduler that is frozen must not hold a request
OPEN_PATIENCE_S = 5.0  # a new request waits this long for a scheduler or worker to come back
RESUME_PATIENCE_S = 30.0  # a running one this long, and as long as the only worker loads its model
SET_BACK_S = 10.0  # one without a token waits this long for a part that is away: a cluster elects a leader in less
BACKOFF_S = (0.05, 1.0)
GAP_S = 0.25
SILENCE_S = 1.0
LOSSES_MAX = 4
EARLY_MAX = 256
STRAY_EVERY_S = 1.0
STRAYS_MAX = 4096
PARKED_PAUSE_S = 5.0  # a worker that begins to serve ends it


class Mesh(Protocol):
    """What a gateway knows of the workers now."""

    def serving(self) -> Collection[str]:
        """The workers that report their state."""

    def alive(self, worker_id: str) -> bool:
        """Whether the worker holds its lease."""

    def coming(self) -> bool:
        """Whether none serves, but one loads its model, or is started when a request comes."""

    def resumes_structured(self) -> bool:
        """Whether a worker can continue an output that is constrained to a grammar."""

    def forgot(self, worker_id: str, request_id: str, epoch: int, since_s: float) -> bool:
        """Whether a state that was sent after `since_s` shows that the worker does not have the request."""


class OwnerCore:
    """The requests of one gateway. `trouble` says what an item's error means, `lost` makes the error of a lost request.

    `park_s`: rule 7; 0: none is parked. Times are seconds on one clock. Every method returns what is to be done, in order.
    """

    def __init__(
        self, mesh: Mesh, *, trouble: Callable[[Any], Trouble], lost: Callable[[str], Trouble], park_s: float = 0.0
    ) -> None:
        self.active: dict[str, Owned] = {}
        self.gaps: dict[Owned, float] = {}
        """Requests with early items, and since when."""
        self._mesh, self._trouble, self._lost = mesh, trouble, lost
        self._park_s = park_s
        self._strays: dict[tuple[str, str], float] = {}
        self._actions: list[Action] = []
        self._now_s = 0.0

    def on(self, event: Event, now_s: float) -> list[Action]:
        """Take in an event."""
        self._now_s = now_s
        match event:
            case Submitted(owned):
                self.active[owned.request_id] = owned
                self._place(owned, OPEN_PATIENCE_S)
            case Answered(owned, epoch, worker_id):
                self._answered(owned, epoch, worker_id)
            case Refused(owned, epoch, trouble):
                self._refused(owned, epoch, trouble)
            case PauseOver(owned, serial):
                self._pause_over(owned, serial)
            case Newcomer():
                self._newcomer()
            case WorkerGone(worker_id):
                for owned in [one for one in self.active.values() if one.worker_id == worker_id]:
                    self._resume(owned, "worker_lost", worker_id)
            case MoveAsked():
                self._move(event)
            case Cancelled(owned):
                self._cancelled(owned)
            case Ended(owned, error, outcome):
                self._abort(owned, error, outcome)
            case Tick(connected):
                self._tick(connected=connected)
        return self._taken()

    def frame(self, worker_id: str, items: Sequence[Item], now_s: float) -> list[Action]:
        """New tokens of a worker. This is a hot path: most items are one plain token."""
        active = self.active
        self._now_s = now_s
        for item in items:
            owned = active.get(item.request_id)
            if owned is None or item.epoch != owned.epoch:  # rule 1
                self._stray(worker_id, item)
                continue
            if owned.worker_id != worker_id:
                if owned.worker_id is not None:
                    self._stray(worker_id, item)
                    continue
                self._accepted(owned, worker_id)  # rule 3
            owned.sign_s = now_s
            if item.index == len(owned.tokens) and item.error is None:
                if owned.plain and item.finish is None and len(item.tokens) == 1:
                    if not owned.push_plain(item.tokens):
                        self._cancel(owned)
                        self._over(owned)
                    continue
                self._take(owned, item.tokens, item, item.logprobs)
                if owned.early:
                    self._take_early(owned)
            else:
                self._on_odd_item(owned, worker_id, item)
        return self._taken() if self._actions else []

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # ---- placing a request on a worker

    def _place(self, owned: Owned, patience_s: float, pause_s: float = 0.0, to: str = "", kv: str = "", was: str = "") -> None:
        """Search for a worker, after a pause. `to`: the worker to be tried first, and once, with the KV blocks of `was`."""
        place = owned.place = Search(self._now_s + pause_s + patience_s, patience_s, BACKOFF_S[0], SUBMIT_TIMEOUT_S[0])
        place.to = to
        if pause_s:
            self._pause(owned, place, pause_s)
        else:
            self._actions.append(Submit(owned, owned.epoch, place.timeout_s, to, (was, kv) if kv else None))

    def _pause(self, owned: Owned, place: Search, pause_s: float) -> None:
        place.waits = True
        place.serial += 1
        self._actions.append(Pause(owned, place.serial, pause_s))

    def _pause_parked(self, owned: Owned, place: Search) -> None:
        self._pause(owned, place, min(PARKED_PAUSE_S, max(place.until_s - self._now_s, BACKOFF_S[0])))

    def _pause_over(self, owned: Owned, serial: int) -> None:
        place = owned.place
        if place is not None and place.waits and place.serial == serial and owned.phase == "placing":
            if owned.parked_s and self._now_s < place.until_s and self._mesh.coming():  # rule 7
                self._pause_parked(owned, place)
                return
            place.pause_s = min(place.pause_s * 2, BACKOFF_S[1])
            self._submit_again(owned, place)

    def _submit_again(self, owned: Owned, place: Search) -> None:
        place.waits = False
        self._actions.append(Submit(owned, owned.epoch, place.timeout_s))

    def _newcomer(self) -> None:
        for owned in self.active.values():
            place = owned.place
            if place is not None and place.waits and owned.phase == "placing":
                place.pause_s = BACKOFF_S[0]
                self._submit_again(owned, place)

    def _accepted(self, owned: Owned, worker_id: str) -> None:
        owned.move("accept")
        owned.worker_id, owned.place = worker_id, None
        if not owned.opened:
            owned.opened = True
            self._actions.append(Placed(owned, worker_id))

    def _answered(self, owned: Owned, epoch: int, worker_id: str) -> None:
        gone = self.active.get(owned.request_id) is not owned
        if gone or owned.epoch != epoch or owned.worker_id not in (None, worker_id):
            if not (gone and owned.finish is not None and owned.worker_id == worker_id):
                self._actions.append(CancelAt(worker_id, owned.request_id, epoch))
        elif owned.worker_id is None:
            self._accepted(owned, worker_id)
            owned.sign_s = self._now_s

    def _refused(self, owned: Owned, epoch: int, trouble: Trouble) -> None:
        """A submission has failed. A new request ends with it, or tries again for a while; a running one always does."""
        place = owned.place
        if owned.phase != "placing" or owned.epoch != epoch or place is None:
            return  # frames answered in the meantime, or another resumption took over
        why, code, error = trouble
        now_s, first = self._now_s, not owned.opened
        lasting = why not in ("unavailable", "late", "overloaded")
        parks = self._waits_for_a_start(owned, place, why)
        if self._all_declined(owned):
            return
        if lasting or now_s > place.until_s or (first and why == "overloaded" and not owned.parked_s):
            self._abort(owned, error, code)
            return
        if why == "late":  # rule 3
            owned.move("resume")
            owned.epoch += 1
            place.timeout_s = min(2 * place.timeout_s, SUBMIT_TIMEOUT_S[1])
        owned.excluded = [w for w in owned.excluded if w in owned.declined or not self._back(w)]
        if parks:
            self._pause_parked(owned, place)
        else:
            self._pause(owned, place, place.pause_s)
        if parks and not owned.parked_s:
            owned.parked_s = now_s
            self._actions.append(Parked(owned))

    def _waits_for_a_start(self, owned: Owned, place: Search, why: Why) -> bool:
        """Set until when the search goes on. Returns whether a new request waits for a worker that starts (rule 7)."""
        coming = self._mesh.coming()
        if owned.opened:
            if coming:
                place.until_s = self._now_s + place.patience_s  # its time counts when a worker serves
            return False
        parks = coming and why == "unavailable" and self._park_s > 0
        if parks or (owned.parked_s and why in ("overloaded", "late")):
            place.until_s = (owned.parked_s or self._now_s) + self._park_s
        elif owned.parked_s:  # nothing starts any more
            place.until_s = min(place.until_s, self._now_s + OPEN_PATIENCE_S)
        return parks

    def _back(self, worker_id: str) -> bool:
        """Whether a lost worker sends messages again."""
        return self._mesh.alive(worker_id) and worker_id in self._mesh.serving()

    # ---- losing a worker

    def _resume(self, owned: Owned, why: str, lost_worker: str | None = None) -> None:
        """Continue on another worker (or the same) with all tokens so far."""
        if lost_worker is not None:
            owned.losses += 1
        else:
            self._cancel(owned)
        self._next_epoch(owned, why, lost_worker)
        if len(owned.tokens) >= owned.max_tokens:  # only its last item was lost
            owned.end("length")
            self._over(owned)
        elif owned.losses >= LOSSES_MAX:  # rule 6
            self._fail(owned, self._lost(f"{owned.losses} workers in a row were lost with this request"))
        elif self._can_go_on(owned):
            self._place(owned, RESUME_PATIENCE_S)

    def _set_back(self, owned: Owned, trouble: Trouble, worker_id: str) -> None:
        """Try another worker, or later: the present one lives but cannot serve, e.g. because the object store is away."""
        now_s = self._now_s
        owned.set_back_s = owned.set_back_s or now_s
        if now_s - owned.set_back_s > (RESUME_PATIENCE_S if owned.tokens else SET_BACK_S):
            self._fail(owned, trouble)
            return
        self._next_epoch(owned, trouble.code, worker_id)
        if self._can_go_on(owned):
            # as long again as the trouble has lasted, within the usual bounds
            self._place(owned, RESUME_PATIENCE_S, min(max(now_s - owned.set_back_s, BACKOFF_S[0]), BACKOFF_S[1]))

    def _decline(self, owned: Owned, trouble: Trouble, worker_id: str) -> None:
        """Try the other workers: the present one can never serve it."""
        owned.declined[worker_id] = trouble
        if self._all_declined(owned):
            return
        self._next_epoch(owned, trouble.code, worker_id)
        if self._can_go_on(owned):
            self._place(owned, RESUME_PATIENCE_S)

    def _all_declined(self, owned: Owned) -> bool:
        """Whether every worker has declined the request, which then ends with the latest reason."""
        if not owned.declined or any(worker_id not in owned.declined for worker_id in self._mesh.serving()):
            return False
        self._fail(owned, list(owned.declined.values())[-1])
        return True

    def _move(self, asked: MoveAsked) -> None:
        """Rule 4. The present worker is not excluded, because it was not lost."""
        owned = self.active.get(asked.request_id)
        if owned is None or owned.epoch != asked.epoch or owned.worker_id in (None, asked.to):
            return
        begun, was = len(owned.tokens), owned.worker_id
        if begun >= owned.max_tokens or (begun and owned.constrained and not self._mesh.resumes_structured()):
            return  # only its last item is missing, or no other worker can continue it
        assert was is not None
        self._cancel(owned, asked.kv)
        owned.move("move")
        self._leave_epoch(owned)
        self._actions.append(Told("moved", asked.to, owned))
        self._place(owned, RESUME_PATIENCE_S, to=asked.to, kv=asked.kv, was=was)

    def _leave_epoch(self, owned: Owned) -> None:
        owned.early.clear()
        self.gaps.pop(owned, None)
        owned.plain = False  # the next token ends the losses in a row
        owned.epoch, owned.worker_id, owned.sign_s, owned.place = owned.epoch + 1, None, self._now_s, None

    def _next_epoch(self, owned: Owned, why: str, avoid: str | None) -> None:
        owned.move("resume")
        self._leave_epoch(owned)
        if avoid is not None and avoid not in owned.excluded:
            owned.excluded.append(avoid)
        owned.resumed_s = owned.resumed_s or owned.sign_s
        self._actions.append(Told("resumed", why, owned))

    def _can_go_on(self, owned: Owned) -> bool:
        """Rule 5. Where nobody can continue it, the request begins again if none of its output was shown, else it is ended."""
        if not owned.constrained or not owned.tokens or self._mesh.resumes_structured() or owned.begin_again():
            return True
        reason = "its worker was lost, and no other can continue an output that is constrained to a grammar"
        self._fail(owned, self._lost(reason))
        return False

    # ---- tokens

    def _take(self, owned: Owned, new: list[int], item: Item, logprobs: Any) -> None:
        if item.finish == "cancelled":  # not by us: its worker gave it up
            self._resume(owned, "given_up", owned.worker_id)
            return
        owned.losses, owned.set_back_s = 0, 0.0
        if owned.resumed_s:
            self._actions.append(Regained(owned, self._now_s - owned.resumed_s))
            owned.resumed_s = 0.0
        owned.push(new, item, logprobs)
        if owned.finish is None and owned.error is None:
            return
        if owned.error is not None or item.finish is None:  # a slow reader, or a stop string: the worker does not know
            self._cancel(owned)
        self._over(owned)

    def _on_odd_item(self, owned: Owned, worker_id: str, item: Item) -> None:
        """Handle an item that is not the next one: an error, known tokens, or early tokens (rule 2)."""
        if item.error is not None:
            trouble = self._trouble(item.error)
            if trouble.why == "lost":
                self._resume(owned, trouble.code, worker_id)
            elif trouble.why == "declined":
                self._decline(owned, trouble, worker_id)
            elif trouble.why in ("unavailable", "overloaded"):
                self._set_back(owned, trouble, worker_id)
            else:
                self._fail(owned, trouble)
            return
        have = len(owned.tokens)
        if item.index < have:
            known = have - item.index
            new = item.tokens[known:]
            if new or item.finish is not None:
                self._take(owned, new, item, item.logprobs[known:] if item.logprobs else None)
                if owned.early:
                    self._take_early(owned)
        elif len(owned.early) < EARLY_MAX:
            owned.early[item.index] = item
            owned.plain = False
            self.gaps.setdefault(owned, self._now_s)
        else:
            self._resume(owned, "gap")

    def _take_early(self, owned: Owned) -> None:
        """Take held early items that are next now; overlaps are dropped like any known token."""
        while owned.early and owned.finish is None and owned.error is None:
            index = min(owned.early)
            have = len(owned.tokens)
            if index > have:
                return
            item = owned.early.pop(index)
            known = have - index
            if item.tokens[known:] or item.finish is not None:
                self._take(owned, item.tokens[known:], item, item.logprobs[known:] if item.logprobs else None)
        self.gaps.pop(owned, None)
        owned.see_plain()

    def _stray(self, worker_id: str, item: Item) -> None:
        """Tell a worker to stop a request that nobody here waits for."""
        if item.finish is not None:
            return
        key, now_s = (worker_id, item.request_id), self._now_s
        if now_s - self._strays.get(key, float("-inf")) < STRAY_EVERY_S:
            return
        if len(self._strays) >= STRAYS_MAX:
            self._strays = {k: t for k, t in self._strays.items() if now_s - t < STRAY_EVERY_S}
            if len(self._strays) >= STRAYS_MAX:
                return
        self._strays[key] = now_s
        self._actions += (Told("stray", worker_id, None), CancelAt(worker_id, item.request_id, item.epoch))

    # ---- watching

    def _tick(self, *, connected: bool) -> None:
        """Detect what no message reports: lasting gaps, workers that disappeared, requests that a worker lost."""
        now_s, mesh = self._now_s, self._mesh
        for owned in [one for one, since_s in self.gaps.items() if now_s - since_s > GAP_S]:
            self._resume(owned, "gap")
        if not connected:
            return
        for owned in list(self.active.values()):
            worker_id = owned.worker_id
            if worker_id is None or now_s - owned.sign_s < SILENCE_S:
                continue
            if not mesh.alive(worker_id):
                self._resume(owned, "worker_lost", worker_id)
            elif mesh.forgot(worker_id, owned.request_id, owned.epoch, owned.sign_s + SILENCE_S):
                self._resume(owned, "forgotten")

    # ---- endings

    def _cancelled(self, owned: Owned) -> None:
        if self.active.get(owned.request_id) is owned:
            self._cancel(owned)
            owned.finish = "cancelled"
            self._over(owned)

    def _abort(self, owned: Owned, error: Any, outcome: str) -> None:
        if self.active.get(owned.request_id) is owned:
            self._cancel(owned)
            owned.fail(error)
            self._over(owned, outcome)

    def _fail(self, owned: Owned, trouble: Trouble) -> None:
        """End a request that its worker does not have any more."""
        owned.fail(trouble.error)
        self._over(owned, trouble.code)

    def _over(self, owned: Owned, outcome: str = "") -> None:
        """Forget an ended request."""
        if self.active.pop(owned.request_id, None) is None:
            return
        owned.move("end")
        self.gaps.pop(owned, None)
        owned.early.clear()
        owned.place = None
        self._actions.append(Over(owned, outcome))

    def _cancel(self, owned: Owned, kv: str = "") -> None:
        if owned.worker_id is not None:
            self._actions.append(CancelAt(owned.worker_id, owned.request_id, owned.epoch, kv))

    def check(self) -> None:
        """Assert that phases and facts agree (tests)."""
        for owned in self.active.values():
            assert owned.phase == ("placing" if owned.worker_id is None else "running"), owned.request_id
            assert (owned.place is not None) == (owned.phase == "placing"), owned.request_id
            assert bool(owned.early) == (owned in self.gaps), owned.request_id
