"""Promise: applying a worker's deltas in order gives its next snapshot."""

from __future__ import annotations

import random

import msgspec
import pytest

from motet.policies.worker.worker_view import View
from motet.services.worker.engines.start_perf import START_PERF as PERF
from motet.shared.model import Residency
from motet.shared.wire.prefixes import unpack_keys
from motet.shared.wire.worker_state import WorkerDelta, WorkerSnapshot
from tests.support_worker import brief_of, generate_request, worker_limits


def apply(known: WorkerSnapshot, delta: WorkerDelta) -> WorkerSnapshot:
    """A receiver of deltas, written from the message's description alone."""
    assert (delta.worker_id, delta.incarnation, delta.seq) == (known.worker_id, known.incarnation, known.seq + 1)
    requests = {brief.request_id: brief for brief in known.requests}
    adapters = {held.digest: held for held in known.adapters}
    for request_id in delta.removed:
        requests.pop(request_id, None)
    requests |= {brief.request_id: brief for brief in delta.changed}
    for digest in delta.evicted:
        adapters.pop(digest, None)
    adapters |= {held.digest: held for held in delta.resident}
    return msgspec.structs.replace(
        known,
        seq=delta.seq,
        draining=delta.draining,
        kv_blocks_free=delta.kv_blocks_free,
        adapter_bytes_free=delta.adapter_bytes_free,
        requests=list(requests.values()),
        adapters=list(adapters.values()),
    )


def as_sets(snapshot: WorkerSnapshot) -> tuple[object, ...]:
    return (
        {brief.request_id: brief for brief in snapshot.requests},
        {held.digest: held for held in snapshot.adapters},
        snapshot.draining,
        snapshot.kv_blocks_free,
        snapshot.seq,
    )


@pytest.mark.parametrize("seed", range(20))
def test_deltas_rebuild_the_next_snapshot_whatever_happens(seed):
    random_ = random.Random(seed)
    view = View("w1", "first", worker_limits())
    known = view.snapshot(PERF)
    for _ in range(60):
        for _ in range(random_.randrange(4)):
            request_id, digest = f"r{random_.randrange(6)}", f"d{random_.randrange(5)}"
            match random_.randrange(5):
                case 0 | 1:
                    phase = random_.choice(["loading", "waiting", "running"])
                    view.put(brief_of(generate_request(request_id, epoch=random_.randrange(3)), phase))
                case 2:
                    view.remove(request_id)
                case 3:
                    view.place(digest, Residency(digest, 8, 1024, random_.choice(["disk", "host", "device"])))
                case 4:
                    view.place(digest, None)
        view.kv_blocks_free = random_.randrange(512)
        view.draining = view.draining or random_.random() < 0.02
        if random_.random() < 0.2:
            known = view.snapshot(PERF)
        elif view.changed:
            known = apply(known, view.delta())
    known = apply(known, view.delta())
    known = msgspec.structs.replace(known, seq=known.seq + 1, kv_blocks_free=view.kv_blocks_free)
    assert as_sets(known) == as_sets(view.snapshot(PERF))


def test_a_snapshot_tells_the_merged_adapter_and_its_share_of_the_requests():
    view = View("w1", "first", worker_limits())
    for name, adapter in (("a", 8), ("b", 8), ("c", 8), ("base", 0)):
        view.put(brief_of(generate_request(name, rank=adapter), "running"))
    unmerged = view.snapshot(PERF)
    view.merged = view.requests["a"].adapter_digest
    merged = view.snapshot(PERF)
    assert (unmerged.merged, unmerged.merged_share) == ("", 0.0)
    assert (merged.merged, merged.merged_share) == (view.merged, 0.75)


def test_what_comes_and_goes_between_two_deltas_is_reported_as_gone():
    view = View("w1", "first", worker_limits())
    view.snapshot(PERF)
    view.put(brief_of(generate_request("r1")))
    view.remove("r1")
    delta = view.delta()
    assert delta.changed == [] and delta.removed == ["r1"]
    assert not view.changed


def test_a_request_that_only_waits_makes_no_message_due_and_its_prefill_does():
    view = View("w1", "first", worker_limits())
    view.snapshot(PERF)
    view.put(brief_of(generate_request("r1"), "waiting"))
    assert not view.changed
    view.put(brief_of(generate_request("r1"), "running"))
    assert view.changed
    assert [brief.phase for brief in view.delta().changed] == ["running"] and not view.changed
    view.put(brief_of(generate_request("r1"), "waiting"))  # it was preempted
    assert view.changed and view.delta().changed
    view.put(brief_of(generate_request("r2"), "waiting"))
    assert not view.changed
    view.remove("r1")
    delta = view.delta()
    assert [brief.request_id for brief in delta.changed] == ["r2"] and delta.removed == ["r1"]  # it rides along


def test_token_progress_rides_on_snapshots_without_a_delta_of_its_own():
    view = View("w1", "first", worker_limits())
    view.put(brief_of(generate_request("r1"), "running"))
    view.snapshot(PERF)
    view.progress("r1", 7)
    view.progress("unknown", 7)
    assert not view.changed
    assert view.snapshot(PERF).requests[0].output_tokens == 7


def test_changes_of_cached_blocks_travel_with_whatever_message_is_next() -> None:
    """An idle worker sends snapshots only, so they tell changes as deltas do."""
    view = View("w", "one", worker_limits())
    view.cache({1: True, 2: True})
    assert not view.changed, "they are no reason for a message"
    assert set(unpack_keys(view.snapshot(PERF).prefixes or b"")) == {1, 2}
    view.cache({3: True, 1: False})
    beat = view.snapshot(PERF, lists_prefixes=False)
    assert (beat.prefixes, list(unpack_keys(beat.cached)), list(unpack_keys(beat.uncached))) == (None, [3], [1])
    view.cache({4: True, 3: False, 9: False})
    delta = view.delta()
    assert (list(unpack_keys(delta.cached)), list(unpack_keys(delta.uncached))) == ([4], [3])
    assert view.prefixes == {2, 4}
    again = view.snapshot(PERF, lists_prefixes=False)
    assert (again.cached, again.uncached) == (b"", b""), "each change is told once"
