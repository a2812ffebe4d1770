"""Promise: all readers of workers' messages by a `WorkerBook` know the same, and what the workers' own views say."""

from __future__ import annotations

import random

from motet.policies.cluster.cluster_view import ClusterView
from motet.policies.cluster.worker_book import DISK_SNAPSHOTS, MAX_BEATS, SNAPSHOT_REQUESTS, Cadence, Shelf, WorkerBook
from motet.policies.worker.worker_view import View
from motet.services.worker.engines.start_perf import START_PERF
from motet.shared.model import Residency
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot
from tests.support_worker import brief_of, generate_request, worker_limits


def worker(incarnation: str = "first") -> View:
    return View("w1", incarnation, worker_limits())


def hear(book: WorkerBook, word: WorkerSnapshot | WorkerDelta, now_s: float = 0.0) -> bool:
    return book.snapshot(word, now_s) if isinstance(word, WorkerSnapshot) else book.delta(word, now_s)


def followed() -> tuple[WorkerBook, Shelf]:
    shelf = Shelf()
    return WorkerBook(shelf), shelf


def test_two_readers_of_the_same_messages_know_the_same_whatever_is_lost_repeated_or_restarted():
    for seed in range(20):
        chance = random.Random(seed)
        shelf, view = Shelf(), ClusterView(in_flight_s=3.0)
        books = [WorkerBook(shelf), WorkerBook(view)]
        said, incarnation = worker(), 0
        late: list[WorkerSnapshot | WorkerDelta] = []
        for _ in range(200):
            said.put(brief_of(generate_request(f"r{chance.randrange(9)}"), chance.choice(["loading", "waiting", "running"])))
            said.remove(f"r{chance.randrange(9)}")
            digest = f"d{chance.randrange(6)}"
            said.place(digest, chance.choice([None, Residency(digest, 8, 64, chance.choice(["disk", "host", "device"]))]))
            if chance.random() < 0.02:
                incarnation += 1
                said = worker(f"incarnation-{incarnation}")
            whole, lists_disk = chance.random() < 0.3, chance.random() < 0.3
            word = said.snapshot(START_PERF, lists_disk=lists_disk) if whole else said.delta()
            late.append(word)
            if chance.random() < 0.1:
                continue  # lost
            if chance.random() < 0.1:
                word = chance.choice(late)
            assert len({hear(book, word) for book in books}) == 1
            assert [known.seq for known in books[0]] == [known.seq for known in books[1]]
        last = said.snapshot(START_PERF)
        assert all(hear(book, last) for book in books)
        held = shelf.of("w1")
        assert set(held.requests) == set(said.requests) == set(view.state.requests("w1"))
        assert {d: one.tier for d, one in held.adapters.items()} == dict(view.state.adapters("w1"))
        assert books[0].gaps == books[1].gaps


def test_a_snapshot_without_the_disk_leaves_what_readers_know_of_the_disk():
    shelf, view = Shelf(), ClusterView(in_flight_s=3.0)
    books = [WorkerBook(shelf), WorkerBook(view)]
    said = worker()

    def place(**tiers):
        for digest, tier in tiers.items():
            said.place(digest, Residency(digest, 8, 64, tier) if tier else None)

    def tell(word):
        assert all(hear(book, word) for book in books)
        known = {digest: one.tier for digest, one in shelf.of("w1").adapters.items()}
        assert known == dict(view.state.adapters("w1"))
        return known

    place(a="disk", b="disk", c="host", d="device")
    everything = {"a": "disk", "b": "disk", "c": "host", "d": "device"}
    assert tell(said.snapshot(START_PERF)) == everything
    short = said.snapshot(START_PERF, lists_disk=False)
    assert [one.digest for one in short.adapters] == ["c", "d"] and tell(short) == everything
    place(a=None, b="host", c="disk", d=None)  # in one of these messages or the next
    tell(said.snapshot(START_PERF, lists_disk=False))
    assert said.changed, "what happened on disk is still to be told"
    assert tell(said.delta()) == {"b": "host", "c": "disk"}
    assert not said.changed


def test_late_readers_learn_of_every_adapter_on_disk_before_long():
    for requests in (0, 1000):
        cadence = Cadence()
        listed = [cadence.lists_disk for _ in range(MAX_BEATS * DISK_SNAPSHOTS * 2) if cadence.whole(requests)]
        assert listed[0] and [listed[n : n + DISK_SNAPSHOTS].count(True) for n in range(DISK_SNAPSHOTS)] == [1] * DISK_SNAPSHOTS


def test_after_a_gap_only_facts_stated_in_full_count_until_the_next_snapshot():
    book, shelf = followed()
    said = worker()
    said.put(brief_of(generate_request("a")))
    assert hear(book, said.snapshot(START_PERF), 1.0)
    said.put(brief_of(generate_request("b")))
    said.delta()  # lost
    said.put(brief_of(generate_request("c")))
    said.draining, said.kv_blocks_free = True, 3
    assert not hear(book, said.delta(), 2.0)
    known = book.get("w1")
    assert known is not None and set(shelf.of("w1").requests) == {"a"} and book.gaps == 1
    assert (known.draining, known.kv_blocks_free, known.heard_s, known.snapshot_s) == (True, 3, 2.0, 1.0)
    assert hear(book, said.snapshot(START_PERF), 3.0)
    assert set(shelf.of("w1").requests) == {"a", "b", "c"} and known.in_sync


def test_lost_messages_count_as_one_gap_whichever_message_shows_it():
    for seen_by_delta in (False, True):
        book, _ = followed()
        said = worker()
        hear(book, said.snapshot(START_PERF))
        hear(book, said.snapshot(START_PERF))
        assert book.gaps == 0
        for _ in range(3):
            said.delta()  # lost
        if seen_by_delta:
            hear(book, said.delta())
        hear(book, said.snapshot(START_PERF))
        assert book.gaps == 1


def test_a_late_message_of_an_ended_incarnation_changes_nothing():
    book, shelf = followed()
    old, new = worker("first"), worker("second")
    old.put(brief_of(generate_request("a")))
    hear(book, old.snapshot(START_PERF))
    assert hear(book, new.snapshot(START_PERF))
    assert not hear(book, old.snapshot(START_PERF)) and not hear(book, old.delta())
    assert shelf.of("w1").requests == {}


def test_a_worker_that_was_silent_counts_again_and_one_that_was_lost_does_not():
    book, _ = followed()
    said = worker()
    hear(book, said.snapshot(START_PERF))
    assert [known.worker_id for known in book.silent(1.0)] == ["w1"] and book.forget("w1")
    assert hear(book, said.snapshot(START_PERF), 1.0) and not book.silent(1.0)
    assert book.lose("w1") and not book.lose("w1")
    assert not hear(book, said.snapshot(START_PERF)) and len(book) == 0


def test_a_shelf_keeps_so_many_requests_of_a_worker_and_no_more():
    shelf = Shelf(max_requests=2)
    book, said = WorkerBook(shelf), worker()
    for name in "abc":
        said.put(brief_of(generate_request(name)))
    hear(book, said.snapshot(START_PERF))
    said.put(brief_of(generate_request("a"), "running"))
    hear(book, said.delta())
    requests = shelf.of("w1").requests
    assert set(requests) == {"a", "b"} and requests["a"].phase == "running"


def test_a_busy_worker_tells_everything_on_every_fourth_heartbeat_and_an_idle_one_on_each():
    idle, busy = Cadence(), Cadence()
    assert all(idle.whole(SNAPSHOT_REQUESTS - 1) for _ in range(8))
    assert [busy.whole(100 * SNAPSHOT_REQUESTS) for _ in range(8)] == [True, *[False] * (MAX_BEATS - 1)] * 2
