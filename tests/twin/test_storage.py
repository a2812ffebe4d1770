from __future__ import annotations

from collections.abc import Callable

import bench.rivals  # noqa: F401 (lru)
from motet.policies.memory.host_tier import LOADS_AT_ONCE, HostTier, Load
from motet.shared.model import AdapterRef
from motet.twin.events import PS_PER_MS, Events
from motet.twin.steps import Link
from motet.twin.storage import Storage, StorageModel

SIZE = 100


def ref(digest: str, size_bytes: int = SIZE) -> AdapterRef:
    return AdapterRef(name=digest, digest=digest, rank=8, size_bytes=size_bytes)


class Host:
    """The host tier of `policies` over the twin's links, without a worker around them."""

    def __init__(self, model: StorageModel, events: Events) -> None:
        self.tier: HostTier[Callable[[], None]] = HostTier(model.host_bytes, model.disk_bytes, eviction="lru")
        self.storage = Storage(model, events, self._loaded)

    def acquire(self, adapter: AdapterRef, ready: Callable[[], None]) -> bool:
        """True if the copy is here; otherwise `ready` is called when it has come."""
        here = self.tier.hold(adapter, ready)
        self._perform()
        return here

    def release(self, digest: str) -> None:
        self.tier.release(digest)
        self._perform()

    def _loaded(self, adapter: AdapterRef) -> None:
        for ready in self.tier.loaded(adapter.digest, adapter.size_bytes, adapter.size_bytes):
            ready()
        self._perform()

    def _perform(self) -> None:
        for action in self.tier.take_actions():
            if isinstance(action, Load):
                self.storage.load(action)


def host(room: int, disk: int | None = None) -> tuple[Host, Events]:
    events = Events()
    model = StorageModel(host_bytes=room, disk_bytes=disk, disk=Link(1.0, 0.0), store=Link(10.0, 0.0))
    return Host(model, events), events


def load(tier: Host, events: Events, digest: str) -> int:
    """Acquire an adapter and wait. Returns how many milliseconds it took."""
    began, came = events.now_ps, []
    if tier.acquire(ref(digest), lambda: came.append(events.now_ps)):
        return 0
    events.run()
    assert came == [events.now_ps]
    return (events.now_ps - began) // PS_PER_MS


def test_the_first_load_comes_from_the_store_and_later_ones_from_disk() -> None:
    tier, events = host(SIZE)
    assert load(tier, events, "a") == 10
    assert load(tier, events, "a") == 0  # a second holder
    tier.release("a")
    tier.release("a")
    assert "a" in tier.tier
    assert load(tier, events, "b") == 10
    assert "a" not in tier.tier
    tier.release("b")
    assert load(tier, events, "a") == 1
    assert (tier.storage.fetches, tier.storage.reads) == (2, 1)


def test_what_was_loaded_longest_ago_leaves_a_full_disk_and_is_fetched_again() -> None:
    tier, events = host(SIZE, disk=2 * SIZE)
    took = []
    for digest in "abacab":
        took.append(load(tier, events, digest))
        tier.release(digest)
    assert took == [10, 10, 1, 10, 1, 10]  # c pushed b out, which was loaded before a
    assert (tier.storage.fetches, tier.storage.reads) == (4, 2)


def test_the_copy_released_longest_ago_leaves_first() -> None:
    tier, events = host(3 * SIZE)
    for digest in "abc":
        load(tier, events, digest)
    for digest in "bac":
        tier.release(digest)
    load(tier, events, "d")
    assert sorted(tier.tier.copies) == ["a", "c", "d"]


def test_a_load_waits_for_a_holder_to_let_go() -> None:
    tier, events = host(SIZE)
    load(tier, events, "a")
    came: list[str] = []
    assert not tier.acquire(ref("b"), lambda: came.append("b"))
    events.run()
    assert came == []
    tier.release("a")
    events.run()
    assert came == ["b"]


def test_loads_at_once_wait_side_by_side_and_share_the_bandwidth_equally() -> None:
    events, ended = Events(), dict[str, int]()
    tier = Host(StorageModel(host_bytes=16 << 20, store=Link(10.0, 3.0)), events)

    def begin(digest: str, mib: int) -> None:
        tier.acquire(ref(digest, mib << 20), lambda: ended.update({digest: events.now_ps // PS_PER_MS}))

    begin("small", 1)
    begin("large", 2)
    events.run(12 * PS_PER_MS)  # each has had 1 ms of the link
    begin("later", 1)  # is on it at 22, when the others are through
    events.run()
    assert ended == {"small": 16, "large": 19, "later": 25}


def test_only_so_many_loads_run_at_once() -> None:
    tier, events = host(100 * SIZE)
    ended: list[int] = []
    for i in range(2 * LOADS_AT_ONCE):
        tier.acquire(ref(str(i)), lambda: ended.append(events.now_ps // PS_PER_MS))
    events.run()
    assert ended == [10] * LOADS_AT_ONCE + [20] * LOADS_AT_ONCE
