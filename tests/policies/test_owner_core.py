"""Promise: the owner's decisions follow its rules, step by step, without a clock or a network."""

from __future__ import annotations

from typing import Any

import pytest

from motet.policies.owner.events import (
    Answered,
    CancelAt,
    Cancelled,
    MoveAsked,
    Newcomer,
    Over,
    Parked,
    Pause,
    PauseOver,
    Placed,
    Refused,
    Submit,
    Submitted,
    Tick,
    Told,
    Trouble,
    WorkerGone,
)
from motet.policies.owner.life import TRANSITIONS, Owned
from motet.policies.owner.owner_core import GAP_S, LOSSES_MAX, OPEN_PATIENCE_S, PARKED_PAUSE_S, SILENCE_S, OwnerCore
from motet.twin.processes import Item, Kept

LATE = Trouble("late", "deadline_exceeded", "late")
AWAY = Trouble("unavailable", "unavailable", "away")
FULL = Trouble("overloaded", "overloaded", "full")


class Taken(Kept):
    def __init__(self, request_id: str = "r", max_tokens: int = 8, *, constrained: bool = False) -> None:
        super().__init__(request_id, max_tokens, constrained=constrained, now_s=0.0)


class World:
    """What the core sees of the workers."""

    def __init__(self) -> None:
        self.here, self.dead, self.is_coming, self.forgets = ["w1", "w2"], set[str](), False, False
        self.follows = False

    def serving(self) -> list[str]:
        return self.here

    def alive(self, worker_id: str) -> bool:
        return worker_id not in self.dead

    def coming(self) -> bool:
        return self.is_coming

    def resumes_structured(self) -> bool:
        return self.follows

    def forgot(self, *_: Any) -> bool:
        return self.forgets


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def core(world: World) -> OwnerCore:
    return OwnerCore(world, trouble=lambda error: error, lost=lambda reason: Trouble("lost", "worker_lost", reason))


def running(core: OwnerCore, owned: Owned, tokens: int = 0) -> None:
    core.on(Submitted(owned), 0.0)
    core.on(Answered(owned, 0, "w1"), 0.0)
    if tokens:
        core.frame("w1", [Item(owned.request_id, 0, 0, list(range(tokens)))], 0.0)
    core.check()


def kinds(actions: list[Any]) -> list[type]:
    return [type(action) for action in actions]


def test_the_table_leads_everywhere_and_out_of_nothing_that_has_ended() -> None:
    assert TRANSITIONS["ended"] == {}
    assert {after for moves in TRANSITIONS.values() for after in moves.values()} == {"placing", "running", "ended"}
    assert all("end" in moves for phase, moves in TRANSITIONS.items() if phase != "ended")


def test_a_new_request_is_submitted_and_placed_with_the_answer(core: OwnerCore) -> None:
    owned = Taken()
    (submit,) = core.on(Submitted(owned), 0.0)
    assert isinstance(submit, Submit) and (submit.epoch, submit.to, submit.kv) == (0, "", None)
    assert core.on(Answered(owned, 0, "w1"), 0.1) == [Placed(owned, "w1")]
    assert (owned.phase, owned.worker_id) == ("running", "w1")


def test_frames_before_the_answer_count_as_the_answer(core: OwnerCore) -> None:
    owned = Taken()
    core.on(Submitted(owned), 0.0)
    assert core.frame("w2", [Item("r", 0, 0, [5])], 0.1) == [Placed(owned, "w2")]
    assert core.on(Answered(owned, 0, "w2"), 0.2) == []
    assert core.on(Answered(owned, 0, "w1"), 0.3) == [CancelAt("w1", "r", 0)], "two workers have it"


def test_an_answer_that_is_lost_costs_an_epoch(core: OwnerCore) -> None:
    owned = Taken()
    core.on(Submitted(owned), 0.0)
    (pause,) = core.on(Refused(owned, 0, LATE), 1.0)
    assert isinstance(pause, Pause) and owned.epoch == 1
    (submit,) = core.on(PauseOver(owned, pause.serial), 1.1)
    assert isinstance(submit, Submit) and submit.epoch == 1 and submit.timeout_s > 1.0
    assert core.on(Answered(owned, 0, "w1"), 1.2) == [CancelAt("w1", "r", 0)], "the late answer's worker has to stop"


def test_a_new_request_waits_a_while_for_a_worker_and_a_newcomer_ends_the_pause(core: OwnerCore) -> None:
    owned = Taken()
    core.on(Submitted(owned), 0.0)
    (pause,) = core.on(Refused(owned, 0, AWAY), 0.1)
    assert kinds(core.on(Newcomer(), 0.12)) == [Submit]
    assert core.on(PauseOver(owned, pause.serial), 0.2) == [], "the pause was over before"
    assert kinds(core.on(Refused(owned, 0, AWAY), OPEN_PATIENCE_S + 0.2)) == [Over]
    assert owned.error == "away" and owned.phase == "ended"


def test_a_new_request_is_parked_while_a_worker_starts_and_goes_to_it_at_once(world: World) -> None:
    core, owned = parking(world), Taken()
    core.on(Submitted(owned), 1.0)
    pause, parked = core.on(Refused(owned, 0, AWAY), 1.1)
    assert parked == Parked(owned) and isinstance(pause, Pause) and pause.pause_s == PARKED_PAUSE_S
    world.is_coming = False
    (submit,) = core.on(PauseOver(owned, pause.serial), 6.1)
    assert isinstance(submit, Submit) and submit.epoch == 0
    world.is_coming = True
    assert kinds(core.on(Refused(owned, 0, AWAY), 6.2)) == [Pause], "it is parked once"
    world.is_coming = False
    assert kinds(core.on(Newcomer(), 40.0)) == [Submit]
    assert core.on(Answered(owned, 0, "w1"), 40.1) == [Placed(owned, "w1")]
    core.check()


def test_a_parked_request_waits_for_room_too_and_ends_when_its_time_is_over(world: World) -> None:
    core, owned = parking(world), Taken()
    core.on(Submitted(owned), 1.0)
    core.on(Refused(owned, 0, AWAY), 1.0)
    world.is_coming = False
    core.on(Newcomer(), 20.0)
    assert kinds(core.on(Refused(owned, 0, FULL), 20.1)) == [Pause]
    assert core.on(Refused(owned, 0, FULL), 62.0) == [Over(owned, "overloaded")]


def test_a_parked_request_ends_soon_when_nothing_starts_any_more(world: World) -> None:
    core, owned = parking(world), Taken()
    core.on(Submitted(owned), 1.0)
    core.on(Refused(owned, 0, AWAY), 1.0)
    world.is_coming = False
    assert kinds(core.on(Refused(owned, 0, AWAY), 10.0)) == [Pause]
    assert kinds(core.on(Refused(owned, 0, AWAY), 10.0 + OPEN_PATIENCE_S)) == [Pause]
    assert core.on(Refused(owned, 0, AWAY), 10.1 + OPEN_PATIENCE_S) == [Over(owned, "unavailable")]


def test_a_parked_request_is_not_sent_while_it_is_known_that_nobody_serves(world: World) -> None:
    """A gateway parks a thousand; sent every few seconds, their prompts would fill the bus and the schedulers' time."""
    core, owned = parking(world), Taken()
    core.on(Submitted(owned), 1.0)
    pause, _ = core.on(Refused(owned, 0, AWAY), 1.1)
    for now_s, pause_s in ((6.1, PARKED_PAUSE_S), (11.1, PARKED_PAUSE_S), (60.0, 1.1)):
        assert isinstance(pause, Pause)
        (pause,) = core.on(PauseOver(owned, pause.serial), now_s)
        assert isinstance(pause, Pause) and pause.pause_s == pytest.approx(pause_s), "no longer than it is parked"
    assert kinds(core.on(PauseOver(owned, pause.serial), 61.2)) == [Submit], "the last try, when its time is over"
    assert core.on(Refused(owned, 0, AWAY), 61.3) == [Over(owned, "unavailable")]


@pytest.mark.parametrize("coming", [True, False], ids=["a worker starts", "it serves"])
def test_a_parked_request_outlasts_a_scheduler_that_does_not_answer(world: World, coming: bool) -> None:
    """NATS is frozen, or a thousand parked requests are submitted at once: neither says that nothing starts any more."""
    core, owned = parking(world), Taken()
    core.on(Submitted(owned), 1.0)
    core.on(Refused(owned, 0, AWAY), 1.0)
    world.is_coming = coming
    for epoch, now_s in enumerate((10.0, 20.0, 30.0)):
        assert kinds(core.on(Refused(owned, epoch, LATE), now_s)) == [Pause]
    assert core.on(Refused(owned, 3, LATE), 62.0) == [Over(owned, LATE.code)]


def test_what_no_worker_will_ever_serve_is_not_parked(world: World) -> None:
    core, owned = parking(world), Taken()
    core.on(Submitted(owned), 1.0)
    assert core.on(Refused(owned, 0, Trouble("final", "bad_request", "no")), 1.1) == [Over(owned, "bad_request")]


def parking(world: World) -> OwnerCore:
    """A core that parks requests for 60 s, where a worker starts."""
    world.is_coming = True
    return OwnerCore(world, trouble=lambda error: error, lost=lambda reason: Trouble("lost", "lost", reason), park_s=60.0)


def test_a_new_request_that_finds_no_room_ends_at_once(core: OwnerCore) -> None:
    owned = Taken()
    core.on(Submitted(owned), 0.0)
    assert core.on(Refused(owned, 0, FULL), 0.1) == [Over(owned, "overloaded")]


def test_a_lost_worker_costs_an_epoch_and_is_avoided(core: OwnerCore) -> None:
    owned = Taken()
    running(core, owned, tokens=3)
    told, submit = core.on(WorkerGone("w1"), 1.0)
    assert told == Told("resumed", "worker_lost", owned)
    assert isinstance(submit, Submit) and (submit.epoch, owned.excluded, owned.losses) == (1, ["w1"], 1)
    core.on(Answered(owned, 1, "w2"), 1.1)
    core.frame("w2", [Item("r", 1, 3, [9])], 1.2)
    assert owned.tokens == [0, 1, 2, 9] and owned.losses == 0


def test_tokens_of_another_epoch_or_worker_are_answered_with_a_cancel_once_a_second(core: OwnerCore) -> None:
    owned = Taken()
    running(core, owned, tokens=1)
    stray = [Item("r", 0, 1, [7])]
    assert core.frame("w2", stray, 1.0) == [Told("stray", "w2", None), CancelAt("w2", "r", 0)]
    assert core.frame("w2", stray, 1.5) == []
    assert kinds(core.frame("w2", stray, 2.1)) == [Told, CancelAt]
    assert owned.tokens == [0]


def test_early_tokens_wait_for_the_missing_ones(core: OwnerCore) -> None:
    owned = Taken()
    running(core, owned, tokens=1)
    assert core.frame("w1", [Item("r", 0, 3, [3])], 1.0) == []
    assert core.frame("w1", [Item("r", 0, 1, [1, 2])], 1.1) == []
    assert owned.tokens == [0, 1, 2, 3]
    core.check()


def test_a_gap_that_lasts_resumes_the_request(core: OwnerCore) -> None:
    owned = Taken()
    running(core, owned, tokens=1)
    core.frame("w1", [Item("r", 0, 3, [3])], 1.0)
    assert core.on(Tick(), 1.0 + GAP_S / 2) == []
    assert kinds(core.on(Tick(), 1.1 + GAP_S)) == [CancelAt, Told, Submit]
    core.check()


def test_known_tokens_are_dropped(core: OwnerCore) -> None:
    owned = Taken()
    running(core, owned, tokens=2)
    core.frame("w1", [Item("r", 0, 0, [0, 1, 2])], 1.0)
    assert owned.tokens == [0, 1, 2]


def test_a_request_that_loses_worker_after_worker_is_ended(core: OwnerCore) -> None:
    owned = Taken()
    core.on(Submitted(owned), 0.0)
    for epoch in range(LOSSES_MAX):
        core.on(Answered(owned, epoch, "w1"), float(epoch))
        actions = core.on(WorkerGone("w1"), epoch + 0.5)
    assert actions[-1] == Over(owned, "worker_lost") and "in a row" in owned.error


def test_a_move_names_the_next_worker_and_where_the_kv_blocks_are(core: OwnerCore) -> None:
    owned = Taken()
    running(core, owned, tokens=2)
    cancel, told, submit = core.on(MoveAsked("r", 0, "w2", "token"), 1.0)
    assert cancel == CancelAt("w1", "r", 0, "token") and told == Told("moved", "w2", owned)
    assert submit == Submit(owned, 1, submit.timeout_s, "w2", ("w1", "token"))
    assert not owned.excluded and not owned.losses
    assert core.on(MoveAsked("r", 0, "w2"), 1.1) == [], "it is in another epoch"


def test_a_constrained_output_goes_on_where_a_worker_can_follow_its_grammar(core: OwnerCore, world: World) -> None:
    world.follows = True
    owned = Taken(constrained=True)
    running(core, owned, tokens=2)
    submit = core.on(WorkerGone("w1"), 1.1)[-1]
    assert isinstance(submit, Submit) and submit.epoch == 1 and len(owned.tokens) == 2
    core.on(Answered(owned, 1, "w2"), 1.2)
    assert Told("moved", "w3", owned) in core.on(MoveAsked("r", 1, "w3"), 1.3)


def test_a_constrained_output_that_was_shown_cannot_go_on_where_no_worker_follows_grammars(core: OwnerCore) -> None:
    owned = Taken(constrained=True)
    running(core, owned, tokens=2)
    assert core.on(MoveAsked("r", 0, "w2"), 1.0) == []
    assert core.on(WorkerGone("w1"), 1.1)[-1] == Over(owned, "worker_lost")
    assert "grammar" in owned.error


def test_what_every_worker_declines_ends_with_the_latest_reason(core: OwnerCore) -> None:
    owned = Taken()
    running(core, owned)
    declined = Trouble("declined", "worker_full", "disk full")
    core.frame("w1", [Item("r", 0, 0, [], "error", error=declined)], 1.0)
    core.on(Answered(owned, 1, "w2"), 1.1)
    assert core.frame("w2", [Item("r", 1, 0, [], "error", error=declined)], 1.2) == [Over(owned, "worker_full")]


def test_silence_is_looked_into(core: OwnerCore, world: World) -> None:
    owned = Taken()
    running(core, owned, tokens=1)
    assert core.on(Tick(), SILENCE_S + 0.1) == [], "its worker lives and has it"
    world.forgets = True
    assert core.on(Tick(connected=False), SILENCE_S + 0.2) == [], "nothing can be heard"
    assert Told("resumed", "forgotten", owned) in core.on(Tick(), SILENCE_S + 0.3)
    world.forgets, owned.worker_id = False, None


def test_a_cancelled_request_is_cancelled_at_its_worker(core: OwnerCore) -> None:
    owned = Taken()
    running(core, owned, tokens=1)
    assert core.on(Cancelled(owned), 1.0) == [CancelAt("w1", "r", 0), Over(owned, "")]
    assert owned.finish == "cancelled" and not core.active
