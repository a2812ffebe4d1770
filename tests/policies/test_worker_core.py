"""Promise: an accepted request is answered exactly once, by the engine or by the core, in any order of messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from motet.policies.memory.host_tier import Evict, Forget, HostTier, Load
from motet.policies.worker.foresight import Foresight
from motet.policies.worker.request_life import TRANSITIONS, Entry, Key
from motet.policies.worker.worker_core import WorkerCore
from motet.policies.worker.worker_events import (
    Answer,
    Assign,
    CancelRequest,
    Close,
    CopyOut,
    DiskFull,
    Fetch,
    Fetched,
    FileLost,
    Loaded,
    LoadFailed,
    NotStarted,
    OwnerLost,
    Pinned,
    Refuse,
    Registered,
    Start,
    Stepped,
    Stop,
    TooLargeForHost,
)
from motet.policies.worker.worker_view import View
from motet.shared.model import AdapterRef, PictureBrief, RequestBrief
from tests.support_worker import brief_of, generate_request, worker_limits

SIZE = 100


def adapter(name: str, size_bytes: int = SIZE) -> AdapterRef:
    return AdapterRef(name=name, digest=name, rank=8, size_bytes=size_bytes)


def core_with(room: int = 10 * SIZE, max_requests: int = 100) -> WorkerCore[str]:
    core: WorkerCore[str] = WorkerCore(
        View("w1", "", worker_limits(pin_slots=1, pin_bytes=SIZE)), HostTier(room, None), max_requests
    )
    core.on(Registered({name: adapter(name) for name in "abcdef"}), 0.0)
    return core


def assign(
    request_id: str, names: str = "", *, epoch: int = 0, owner: str = "g1", size_bytes: int = SIZE, fetch: bool = False
) -> Assign[str]:
    """A request for the adapters whose names are the letters of `names`."""
    refs = tuple(adapter(name, size_bytes) for name in names)
    brief = msgspec.structs.replace(
        brief_of(generate_request(request_id, epoch=epoch)),
        adapter_digest=names[:1],
        picture=PictureBrief(1.0, tuple(names[1:])),
    )
    return Assign(brief, owner, refs, request_id, fetch)


def moved(entry: Entry[str], phase: str) -> RequestBrief:
    return msgspec.structs.replace(entry.brief, phase=phase)


def only_start(actions: list) -> Entry[str]:
    (action,) = actions
    assert isinstance(action, Start)
    return action.entry


def test_every_phase_can_end_and_nothing_leaves_the_table() -> None:
    assert all("end" in moves for phase, moves in TRANSITIONS.items() if phase != "gone")
    assert {after for moves in TRANSITIONS.values() for after in moves.values()} <= set(TRANSITIONS)
    entry = Entry(assign("r").brief, "g", (), "r")
    entry.move("end")
    with pytest.raises(KeyError):
        entry.move("start")


def test_a_request_is_in_the_core_and_in_the_view_from_its_assignment_on() -> None:
    core = core_with()
    assert core.on(assign("r", "a"), 0.0) == [Load(adapter("a"), "store")]
    assert core.view.requests["r"].phase == "loading" and len(core) == 1
    entry = only_start(core.on(Loaded("a", SIZE, SIZE), 1.0))
    assert entry.payload == "r" and core.view.requests["r"].phase == "waiting" and core.view.adapters["a"].tier == "host"
    core.on(Stepped(moved=[moved(entry, "running")], device=[("a", True)]), 2.0)
    assert core.view.requests["r"].phase == "running" and core.view.adapters["a"].tier == "device"
    core.on(Stepped(moved=[moved(entry, "waiting")]), 2.0)
    assert entry.phase == "waiting"
    core.on(Stepped(ended=[entry.key]), 3.0)
    assert len(core) == 0 and core.view.requests == {} and core.host.holders("a") == 0
    core.check()


def test_requests_that_waited_for_one_adapter_start_in_the_order_in_which_they_came() -> None:
    core = core_with()
    for name in ("first", "second", "third"):
        core.on(assign(name, "a"), 0.0)
    started = core.on(Loaded("a", SIZE, SIZE), 1.0)
    assert [action.entry.payload for action in started if isinstance(action, Start)] == ["first", "second", "third"]


def test_an_assignment_that_is_repeated_is_taken_once_and_an_older_epoch_is_refused() -> None:
    core = core_with()
    only_start(core.on(assign("r", epoch=2), 0.0))
    assert core.on(assign("r", epoch=2), 0.0) == []
    assert core.on(assign("r", epoch=1), 0.0) == [Refuse("older", newest=2)]


def test_a_newer_epoch_replaces_an_older_one_that_ends_when_the_engine_says_so() -> None:
    core = core_with()
    old = only_start(core.on(assign("r"), 0.0))
    stop, start = core.on(assign("r", epoch=1), 0.0)
    assert stop == Stop("r", 0) and isinstance(start, Start) and len(core) == 2
    core.on(Stepped(moved=[moved(old, "running")]), 0.0)  # said before it heard of the stop
    assert core.view.requests["r"].epoch == 1 and old.phase == "leaving"
    core.on(Stepped(ended=[old.key]), 0.0)
    assert core.view.requests["r"].epoch == 1 and len(core) == 1
    core.check()


def test_a_full_worker_says_when_to_come_back_and_a_closed_one_does_not_take_anything() -> None:
    core = core_with(max_requests=1)
    entry = only_start(core.on(assign("a"), 0.0))
    assert core.on(assign("b"), 0.0) == [Refuse("full", retry_after_s=1.0)]
    core.on(Stepped(ended=[entry.key]), 1.0)
    core.on(Close(), 1.0)
    assert core.view.draining and core.on(assign("b"), 1.0) == [Refuse("closed")]


def test_cancelling_a_request_that_still_loads_answers_it_and_one_in_the_engine_is_stopped() -> None:
    core = core_with()
    core.on(assign("loading", "a"), 0.0)
    (answer,) = core.on(CancelRequest("loading", 5), 0.0)
    assert isinstance(answer, Answer) and (answer.entry.payload, answer.finish) == ("loading", "cancelled")
    only_start(core.on(assign("running", epoch=3), 0.0))
    assert core.on(CancelRequest("running", 2), 0.0) == [] == core.on(CancelRequest("unknown", 2), 0.0)
    assert core.on(CancelRequest("running", 3), 0.0) == [Stop("running", 3)]


def test_a_lost_gateway_takes_its_own_requests_with_it() -> None:
    core = core_with()
    core.on(assign("mine", owner="g1"), 0.0)
    core.on(assign("theirs", owner="g2"), 0.0)
    assert core.on(OwnerLost("g1"), 0.0) == [Stop("mine", 0)]


def test_a_load_that_fails_answers_the_waiting_requests_and_the_next_one_tries_again() -> None:
    core = core_with()
    core.on(assign("r1", "a"), 0.0)
    core.on(assign("r2", "a"), 0.0)
    answers = core.on(LoadFailed("a", "broken"), 0.0)
    assert [(one.entry.payload, one.finish, one.reason) for one in answers if isinstance(one, Answer)] == [
        ("r1", "error", "broken"),
        ("r2", "error", "broken"),
    ]
    assert core.on(assign("r3", "a"), 0.0) == [Load(adapter("a"), "store")]


def test_an_adapter_that_never_fits_is_answered_with_both_sizes() -> None:
    core = core_with(room=SIZE)
    (answer,) = core.on(assign("r", "a", size_bytes=101), 0.0)
    assert isinstance(answer, Answer) and answer.reason == TooLargeForHost(101, 100) and len(core) == 0


def test_what_the_engine_does_not_take_is_refused_or_answered_and_leaves_nothing() -> None:
    core = core_with()
    entry = only_start(core.on(assign("base"), 0.0))
    assert core.on(NotStarted(entry.key), 0.0) == [] and len(core) == 0
    core.on(assign("r", "a"), 0.0)
    entry = only_start(core.on(Loaded("a", SIZE, SIZE), 0.0))
    (answer,) = core.on(NotStarted(entry.key, "no room"), 0.0)
    assert isinstance(answer, Answer) and answer.reason == "no room" and core.host.holders("a") == 0


def test_handing_back_answers_what_the_engine_does_not_have() -> None:
    core = core_with()
    core.on(assign("loading", "a"), 0.0)
    entry = only_start(core.on(assign("waiting"), 0.0))
    (answer,) = core.on(Close("leaving"), 0.0)
    assert isinstance(answer, Answer)
    assert (answer.entry.payload, answer.finish, answer.reason) == ("loading", "error", "leaving")
    assert [one for one in core] == [entry], "the engine ends its own"


def test_a_version_that_the_registry_deleted_leaves_every_tier_once_it_is_unused() -> None:
    core = core_with()
    core.on(assign("r", "a"), 0.0)
    entry = only_start(core.on(Loaded("a", SIZE, SIZE), 0.0))
    core.on(Stepped(device=[("a", True)]), 0.0)
    assert core.on(Registered({}), 0.0) == [CopyOut("a")]
    assert core.view.adapters["a"].tier == "device"
    assert core.on(Stepped(ended=[entry.key], device=[("a", False)]), 0.0) == [Forget("a")]
    assert core.view.adapters == {}


def test_a_full_disk_costs_a_file_that_is_not_needed() -> None:
    core = core_with()
    core.on(assign("r", "a"), 0.0)
    entry = only_start(core.on(Loaded("a", SIZE, SIZE), 0.0))
    assert core.on(DiskFull(SIZE), 0.0) == [] and core.disk_room == "later", "the adapter is in use"
    assert core.on(DiskFull(SIZE + 1), 0.0) == [] and core.disk_room == "never"
    core.on(Stepped(ended=[entry.key]), 0.0)
    assert core.on(DiskFull(SIZE), 0.0) == [Evict("a", "host"), Evict("a", "disk")] and core.view.adapters == {}
    assert core.disk_room == "made"
    core.on(assign("s", "b"), 0.0)
    core.on(FileLost("b"), 0.0)
    core.check()


def test_a_moved_request_starts_when_its_blocks_and_its_adapter_are_there_in_either_order() -> None:
    for blocks_first in (True, False):
        core = core_with()
        fetch, load = core.on(assign("r", "a", fetch=True), 0.0)
        assert isinstance(fetch, Fetch) and load == Load(adapter("a"), "store")
        assert core.view.requests["r"].phase == "loading"
        events = [Fetched(("r", 0)), Loaded("a", SIZE, SIZE)]
        first, second = events if blocks_first else events[::-1]
        assert core.on(first, 1.0) == []
        assert only_start(core.on(second, 2.0)) is fetch.entry
        assert core.on(Fetched(("r", 0)), 3.0) == []
        core.check()


def test_a_request_whose_blocks_still_come_can_be_cancelled_with_its_adapter_here_or_not() -> None:
    for name in ("", "a", "b"):
        core = core_with()
        core.on(assign("other", "a"), 0.0)
        core.on(Loaded("a", SIZE, SIZE), 0.0)
        assert isinstance(core.on(assign("r", name, fetch=True), 0.0)[0], Fetch)
        (answer,) = [action for action in core.on(CancelRequest("r", 0), 1.0) if isinstance(action, Answer)]
        assert answer.finish == "cancelled"
        assert core.on(Fetched(("r", 0)), 2.0) == [] and len(core) == 1
        core.check()


@dataclass
class World:
    """An engine, an adapter store and gateways that do everything they may do, late and in any order."""

    chance: random.Random
    most: int = 1  # adapters of a request
    grow: int = 1  # copies are up to so many times as large as promised
    core: WorkerCore[str] = field(default_factory=lambda: core_with(room=4 * SIZE, max_requests=12))
    engine: dict[Key, Entry[str]] = field(default_factory=dict)
    stopped: set[Key] = field(default_factory=set)
    loads: list[str] = field(default_factory=list)
    fetches: list[Key] = field(default_factory=list)
    taken: dict[Key, int] = field(default_factory=dict)  # -> answers
    numbers: int = 0

    def on(self, event: object) -> None:
        for action in self.core.on(event, float(self.numbers)):  # type: ignore[arg-type]
            match action:
                case Start(entry):
                    assert entry.key not in self.engine
                    self.engine[entry.key] = entry
                case Stop(request_id, epoch):
                    assert (request_id, epoch) in self.engine
                    self.stopped.add((request_id, epoch))
                case Answer(entry):
                    self.taken[entry.key] += 1
                case Fetch(entry):
                    self.fetches.append(entry.key)
                case Load(ref):
                    self.loads.append(ref.digest)
                case Refuse():
                    self.taken.pop((event.brief.request_id, event.brief.epoch))  # type: ignore[attr-defined]
        self.core.check()
        if self.grow == 1:  # a load reserves what was promised
            self.core.memory.check()

    def assign(self) -> None:
        self.numbers += 1
        names = "".join(self.chance.sample("abcdef", self.chance.randint(0, self.most)))
        said = assign(f"r{self.chance.randrange(15)}", names, epoch=self.numbers)
        said = msgspec.structs.replace(said, fetch=self.chance.random() < 0.2)
        self.taken[said.brief.request_id, said.brief.epoch] = 0
        self.on(said)

    def fetched(self) -> None:
        self.on(Fetched(self.fetches.pop(self.chance.randrange(len(self.fetches)))))

    def load(self) -> None:
        digest = self.loads.pop(self.chance.randrange(len(self.loads)))
        size_bytes = SIZE * self.chance.randint(1, self.grow)
        self.on(Loaded(digest, size_bytes, SIZE) if self.chance.random() < 0.8 else LoadFailed(digest, "broken"))

    def step(self) -> None:
        """Some requests move and some end; stopped ones end soon."""
        some = [entry for entry in self.engine.values() if self.chance.random() < 0.3]
        ended = [entry for entry in some if entry.key in self.stopped or self.chance.random() < 0.3]
        for entry in ended:
            del self.engine[entry.key]
            self.stopped.discard(entry.key)
            self.taken[entry.key] += 1
        going = [entry for entry in some if entry not in ended]
        briefs = [moved(entry, self.chance.choice(["running", "waiting"])) for entry in going]
        self.on(Stepped(moved=briefs, ended=[entry.key for entry in ended]))


@pytest.mark.parametrize(("most", "grow"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("seed", range(10))
def test_in_random_histories_every_request_taken_is_answered_exactly_once(seed: int, most: int, grow: int) -> None:
    world = World(random.Random(seed), most, grow)
    chance = world.chance
    for _ in range(1500):
        match chance.randrange(10):
            case 0 | 1 | 2:
                world.assign()
            case 3 | 4:
                world.step()
            case 5 if world.loads:
                world.load()
            case 6:
                world.on(CancelRequest(f"r{chance.randrange(15)}", chance.randrange(world.numbers + 1)))
            case 7:
                name = chance.choice("abcdef")
                left = {one: adapter(one) for one in "abcdef" if one != name or chance.random() < 0.5}
                world.on(chance.choice([Pinned([adapter(name)]), Registered(left), OwnerLost("g9")]))
            case 8 if chance.random() < 0.1:
                world.on(DiskFull(chance.randrange(4 * SIZE)))
            case 9 if world.fetches:
                world.fetched()
    world.on(Close("leaving"))
    while world.engine or world.loads:
        world.step()
        if world.loads:
            world.load()
    assert len(world.core) == 0 and world.taken and set(world.taken.values()) == {1}


@pytest.mark.parametrize("grow", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_requests_for_several_adapters_never_wait_for_each_other_for_ever(seed: int, grow: int) -> None:
    world = World(random.Random(seed), 4, grow)
    for _ in range(300):
        if world.chance.random() < 0.4:
            world.assign()
        elif world.loads and world.chance.random() < 0.5:
            world.load()
        else:
            world.step()
    for _ in range(2000):  # nobody closes the worker: what is here must come to its end by itself
        if world.loads:
            world.load()
        if world.fetches:
            world.fetched()
        world.step()
    assert len(world.core) == 0 and world.taken and set(world.taken.values()) == {1}


def test_a_request_starts_when_all_its_adapters_are_in_host_memory() -> None:
    core = core_with()
    loads = [action.adapter.digest for action in core.on(assign("r", "abc"), 0.0) if isinstance(action, Load)]
    assert sorted(loads) == ["a", "b", "c"]
    assert core.on(Loaded("b", SIZE, SIZE), 1.0) == core.on(Loaded("a", SIZE, SIZE), 1.0) == []
    assert core.book["r"].phase == "loading"
    entry = only_start(core.on(Loaded("c", SIZE, SIZE), 2.0))
    assert entry.payload == "r" and [core.host.holders(name) for name in "abc"] == [1, 1, 1]
    core.on(Stepped(ended=[("r", 0)]), 3.0)
    assert [core.host.holders(name) for name in "abc"] == [0, 0, 0]


def test_a_request_whose_adapters_are_all_in_host_memory_starts_at_once() -> None:
    core = core_with()
    for name in "ab":
        core.on(assign(name, name), 0.0)
        core.on(Loaded(name, SIZE, SIZE), 0.0)
    assert only_start(core.on(assign("r", "ab"), 1.0)).holds == ("a", "b")


def test_adapters_that_do_not_fit_together_are_refused() -> None:
    core = core_with(room=250)
    (answer,) = core.on(assign("r", "abc"), 0.0)
    assert isinstance(answer, Answer) and answer.reason == TooLargeForHost(300, 250) and len(core) == 0


def test_adapters_whose_copies_turn_out_too_large_together_are_refused() -> None:
    core = core_with(room=250)
    core.on(assign("r", "ab"), 0.0)
    core.on(Loaded("a", 140, SIZE), 0.0)
    (answer,) = [one for one in core.on(Loaded("b", 140, SIZE), 0.0) if isinstance(one, (Answer, Start))]
    assert isinstance(answer, Start), "both copies are here"
    core = core_with(room=250)
    core.on(assign("r", "ab"), 0.0)
    (answer,) = [one for one in core.on(Loaded("a", 160, SIZE), 0.0) if isinstance(one, Answer)]
    assert answer.reason == TooLargeForHost(260, 250) and len(core) == 0 and core.host.holders("a") == 0
    core.check()


def test_the_failed_load_of_one_adapter_ends_only_the_requests_for_it() -> None:
    core = core_with()
    core.on(assign("r", "ab"), 0.0)
    core.on(assign("other", "ac"), 0.0)
    core.on(Loaded("a", SIZE, SIZE), 0.0)
    (answer,) = [one for one in core.on(LoadFailed("b", "broken"), 1.0) if isinstance(one, Answer)]
    assert (answer.entry.payload, answer.reason, answer.failed) == ("r", "broken", "b")
    assert core.host.holders("a") == 1
    assert only_start(core.on(Loaded("c", SIZE, SIZE), 2.0)).payload == "other"


def test_a_cancelled_request_lets_go_of_what_it_holds_and_of_what_it_waits_for() -> None:
    core = core_with()
    core.on(assign("r", "ab"), 0.0)
    core.on(Loaded("a", SIZE, SIZE), 0.0)
    (answer,) = [one for one in core.on(CancelRequest("r", 0), 1.0) if isinstance(one, Answer)]
    assert answer.finish == "cancelled" and core.host.holders("a") == 0
    core.on(Loaded("b", SIZE, SIZE), 2.0)
    assert core.host.holders("b") == 0 and len(core) == 0
    core.check()


def test_of_two_requests_that_do_not_fit_together_the_second_holds_nothing_while_the_first_loads() -> None:
    core = core_with(room=3 * SIZE)
    for name in "ac":
        core.on(assign(name, name), 0.0)
        core.on(Loaded(name, SIZE, SIZE), 0.0)
        core.on(Stepped(ended=[(name, 0)]), 0.0)
    core.on(assign("first", "ab"), 1.0)
    core.on(assign("second", "cd"), 1.0)
    assert (core.host.holders("a"), core.host.holders("c")) == (1, 0)
    assert only_start([one for one in core.on(Loaded("b", SIZE, SIZE), 2.0) if isinstance(one, Start)]).payload == "first"


def test_foresight_learns_of_every_adapter_of_a_request() -> None:
    core = core_with()
    core.foresight = Foresight()
    core.on(assign("r", "ab"), 1.0)
    assert set(core.foresight.forecast) == {"a", "b"}
