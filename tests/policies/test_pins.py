"""Promise: pinned adapters are loaded without a request, loaded again after an eviction, and never take all room."""

from __future__ import annotations

from array import array

import bench.rivals  # noqa: F401 (adds the names)
from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.host_tier import Evict, HostTier, Load
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.step.batch_admission import AdmissionLimits
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence
from motet.policies.worker import pins
from motet.policies.worker.worker_core import PIN_RETRY_S, WorkerCore
from motet.policies.worker.worker_events import CopyIn, Loaded, LoadFailed, PinAdapters, Pinned, Registered, Stepped, Tick
from motet.policies.worker.worker_view import View
from motet.shared.model import AdapterRef
from tests.policies.test_worker_core import assign, only_start
from tests.support_worker import worker_limits

SIZE = 100


def ref(digest: str, size_bytes: int = SIZE) -> AdapterRef:
    return AdapterRef(name=digest, digest=digest, rank=8, size_bytes=size_bytes)


def core_with(room: int = 10 * SIZE) -> WorkerCore[str]:
    limits = worker_limits(pin_slots=3, pin_bytes=room // 2)
    core: WorkerCore[str] = WorkerCore(View("w1", "", limits), HostTier(room, None), 100)
    core.on(Registered({name: ref(name) for name in "abcdef"}), 0.0)
    return core


def test_older_pins_come_first_and_one_that_does_not_fit_leaves_its_room_to_later_ones() -> None:
    limits = worker_limits(pin_slots=3, pin_bytes=10 * SIZE)
    asked = [ref("a", 6 * SIZE), ref("large", 5 * SIZE), ref("b"), ref("a", 6 * SIZE), ref("c"), ref("d")]
    assert list(pins.within(asked, limits)) == ["a", "b", "c"]
    assert pins.within(asked, worker_limits()) == {}, "a worker that says nothing takes no pins"


def test_a_pinned_adapter_is_loaded_and_copied_without_a_request() -> None:
    core = core_with()
    assert core.on(Pinned([ref("a")]), 0.0) == [PinAdapters({"a": ref("a")}.keys()), Load(ref("a"), "store")]
    assert core.on(Tick(), 0.5) == []
    assert core.on(Loaded("a", SIZE, SIZE), 1.0) == [CopyIn("a")]
    core.on(Stepped(device=[("a", True)]), 1.0)
    assert core.on(Tick(), 1.5) == []
    core.check()


def test_a_pinned_adapter_that_had_to_leave_the_device_comes_back() -> None:
    core = core_with()
    core.on(Pinned([ref("a")]), 0.0)
    core.on(Loaded("a", SIZE, SIZE), 0.0)
    core.on(Stepped(device=[("a", True)]), 0.0)
    core.on(Stepped(device=[("a", False)]), 1.0)
    assert core.on(Tick(), 1.5) == [CopyIn("a")]
    core.on(Pinned([]), 2.0)
    assert core.on(Tick(), 2.5) == []


def test_a_copy_that_a_pin_brought_counts_as_no_use_of_the_adapter() -> None:
    core: WorkerCore[str] = WorkerCore(
        View("w1", "", worker_limits(pin_slots=1, pin_bytes=SIZE)), HostTier(2 * SIZE, None, eviction="score"), 100
    )
    core.on(Registered({name: ref(name) for name in "abc"}), 0.0)
    core.on(Pinned([ref("a")]), 0.0)
    core.on(Loaded("a", SIZE, SIZE), 0.0)
    core.on(Pinned([]), 0.0)
    for at_s, name in ((1.0, "a"), (2.0, "b")):  # a request for each
        actions = core.on(assign(name, name), at_s)
        actions += core.on(Loaded(name, SIZE, SIZE), at_s) if name == "b" else []
        entry = only_start([action for action in actions if not isinstance(action, Load)])
        core.on(Stepped(ended=[entry.key]), at_s)
    assert Evict("a", "host") in core.on(assign("c", "c"), 3.0), "used as often as b, and longer ago"
    core.check()


def test_a_pinned_adapter_that_cannot_be_loaded_is_tried_again_after_a_while() -> None:
    core = core_with()
    core.on(Pinned([ref("a")]), 0.0)
    core.on(LoadFailed("a", "away"), 1.0)
    assert core.on(Tick(), 1.5) == []
    assert core.on(Tick(), 1.0 + PIN_RETRY_S) == [Load(ref("a"), "store")]


def test_a_version_that_is_gone_is_not_loaded_for_its_pin() -> None:
    core = core_with()
    core.on(Registered({}), 0.0)
    (pin,) = core.on(Pinned([ref("a")]), 0.0)
    assert isinstance(pin, PinAdapters)


def test_pinned_copies_and_files_leave_after_all_others() -> None:
    core = core_with(3 * SIZE)
    core.host.disk_bytes = 3 * SIZE
    core.view.limits = worker_limits(pin_slots=1, pin_bytes=SIZE)
    core.on(Pinned([ref("a")]), 0.0)
    core.on(Loaded("a", SIZE, SIZE), 0.0)
    for number, name in enumerate("bcd"):
        core.on(assign(name, name), 1.0 + number)
        actions = core.on(Loaded(name, SIZE, SIZE), 1.0 + number)
        entry = only_start([action for action in actions if not isinstance(action, Evict)])
        core.on(Stepped(ended=[entry.key]), 1.0 + number)
    assert sorted(core.host.copies) == ["a", "c", "d"] and sorted(core.host.files) == ["a", "c", "d"]
    core.check()


def batches(slots: int) -> BatchCore[Sequence]:
    limits = AdmissionLimits(max_running=4, max_step_tokens=64)
    return BatchCore(limits, kv=KvBlocks(64, 16), slots=AdapterSlots(slots, 10 * SIZE))


def idle(core: BatchCore[Sequence], *digests: str) -> None:
    for digest in digests:
        assert core.slots.acquire(digest, SIZE)
        core.slots.release(digest)


def test_idle_adapters_leave_the_device_for_a_pinned_one_and_for_no_other_prefetch() -> None:
    core = batches(2)
    idle(core, "x", "y")
    assert core.load("a", SIZE) is None
    core.slots.pinned = {"a"}
    grant = core.load("a", SIZE)
    assert grant is not None and [digest for digest, _ in grant.evicted] == ["x"]
    core.check()


def test_a_pin_takes_no_room_from_requests_that_wait() -> None:
    core = batches(1)
    idle(core, "x")
    core.start(Sequence(order=0, tokens=array("i", [1, 2]), adapter="x", adapter_bytes=SIZE))
    core.slots.pinned = {"a"}
    assert core.load("a", SIZE) is None
    assert [seq.adapter for seq in core.decide().admitted] == ["x"]
    core.check()


def test_adapters_at_home_come_one_after_the_other_into_free_room_and_each_once() -> None:
    core = core_with()
    homes = [ref("a"), ref("b")]
    assert core.on(Pinned([], homes), 0.0) == [PinAdapters({}.keys())]
    assert core.on(Tick(), 0.5) == [Load(ref("a"), "store")]
    assert core.on(Tick(), 1.0) == [], "one at a time"
    assert core.on(Loaded("a", SIZE, SIZE), 1.0) == [CopyIn("a")]
    core.on(Stepped(device=[("a", True)]), 1.0)
    assert core.on(Tick(), 1.5) == [Load(ref("b"), "store")]
    core.on(Loaded("b", SIZE, SIZE), 2.0)
    core.on(Stepped(device=[("b", True)]), 2.0)
    core.on(Stepped(device=[("b", False)]), 3.0)
    assert core.on(Tick(), 3.5) == [], "one that had to leave does not come back by itself"
    core.check()
