"""Promise: while nothing else is copied, the likeliest adapter is loaded one tier up, without taking memory that is needed."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np

from bench.rivals import EVICTIONS
from motet.policies.memory.adapter_slots import AdapterSlots
from motet.policies.memory.eviction import make_eviction
from motet.policies.memory.host_tier import Evict, HostTier, Load
from motet.policies.memory.kv_blocks import KvBlocks
from motet.policies.step.batch_admission import AdmissionLimits
from motet.policies.step.batch_core import BatchCore
from motet.policies.step.batch_state import Sequence, StepPlan
from motet.policies.step.cold_start import ColdStarts
from motet.policies.worker.foresight import AGAIN_S, LOOKED_AT, Foresight
from motet.policies.worker.worker_core import WorkerCore
from motet.policies.worker.worker_events import CopyIn, Loaded, Registered, Stepped, Tick
from motet.policies.worker.worker_view import View
from motet.shared.model import AdapterRef, Mechanism
from motet.shared.worker_options import Switch, WorkerOptions
from motet.twin.cluster import Cluster
from motet.twin.link import Copies, LinkModel
from motet.twin.steps import A10_MBGMV
from tests.policies.test_worker_core import assign, only_start
from tests.support_worker import worker_limits
from tests.twin.support import spec, workload

SIZE = 100


def ref(digest: str) -> AdapterRef:
    return AdapterRef(name=digest, digest=digest, rank=8, size_bytes=SIZE)


def often(foresight: Foresight, digest: str, until_s: float, every_s: float) -> None:
    for step in range(int(until_s / every_s), -1, -1):
        foresight.asked(digest, until_s - step * every_s)


def test_the_likeliest_adapter_is_next_and_is_left_alone_for_a_while_when_it_does_not_come() -> None:
    foresight = Foresight()
    often(foresight, "hourly", 7200.0, 3600.0)
    often(foresight, "often", 7200.0, 20.0)
    assert foresight.next(7201.0, lambda _: True) is None, "it was asked for a moment ago"
    assert foresight.next(7210.0, lambda _: True) == "often"
    assert foresight.next(7211.0, lambda _: True) is None
    assert foresight.next(7211.0 + AGAIN_S, lambda digest: digest != "often") is None
    assert foresight.next(7211.0 + AGAIN_S, lambda _: True) == "often"


def test_every_adapter_is_looked_at_in_turn() -> None:
    foresight = Foresight()
    for number in range(3 * LOOKED_AT):
        foresight.asked(f"d{number}", 0.0)
    seen: list[str] = []
    for step in range(3):
        foresight.next(float(step), lambda digest: bool(seen.append(digest)))
    assert sorted(seen) == sorted(f"d{number}" for number in range(3 * LOOKED_AT))


def test_only_clearly_less_likely_adapters_leave_the_least_likely_first() -> None:
    foresight = Foresight()
    for digest, every_s in (("often", 10.0), ("as-often", 11.0), ("sometimes", 60.0), ("seldom", 300.0)):
        often(foresight, digest, 6000.0, every_s)
    assert foresight.weaker("often", ["as-often", "sometimes", "seldom"], 6001.0) == ["seldom", "sometimes"]


def test_equally_unlikely_adapters_leave_in_the_same_order_however_they_are_given() -> None:
    foresight = Foresight()
    for digest, every_s in (("often", 10.0), *((f"seldom-{number}", 300.0) for number in range(4))):
        often(foresight, digest, 6000.0, every_s)
    seldom = [f"seldom-{number}" for number in range(4)]
    assert foresight.weaker("often", seldom, 6001.0) == foresight.weaker("often", seldom[::-1], 6001.0) == seldom


def idle(slots: AdapterSlots, *digests: str) -> None:
    for digest in digests:
        assert slots.acquire(digest, SIZE)
        slots.release(digest)


def test_a_foreseen_adapter_takes_room_from_those_named_and_not_from_pinned_or_waited_ones() -> None:
    for name in EVICTIONS.keys() - {"none"}:
        slots = AdapterSlots(4, 4 * SIZE, eviction=make_eviction(name))
        idle(slots, *"abcd")
        slots.pinned, slots.waited = {"a"}, lambda: {"b"}
        assert slots.foresee("x", SIZE, []) is None and slots.foresee("x", SIZE, ["a", "b"]) is None
        grant = slots.foresee("x", SIZE, ["a", "b", "d", "c"])
        assert grant is not None and [digest for digest, _ in grant.evicted] == ["d"]
        assert "x" in set(slots.victims())
        slots.check({})


def batches(*, asynchronous: bool = True) -> BatchCore[Sequence]:
    slots = AdapterSlots(2, 2 * SIZE, asynchronous=asynchronous)
    limits = AdmissionLimits(max_running=4, max_step_tokens=64)
    return BatchCore(limits, kv=KvBlocks(64, 16), slots=slots, cold=ColdStarts(4, 64, "blocking") if asynchronous else None)


def sequence(adapter: str) -> Sequence:
    return Sequence(order=0, tokens=array("i", [1, 2]), adapter=adapter, adapter_bytes=SIZE)


def test_nothing_is_foreseen_while_a_copy_is_under_way_or_a_request_waits_or_copies_stop_the_steps() -> None:
    core = batches()
    assert core.foresee("a", SIZE, []) is not None
    assert core.foresee("b", SIZE, []) is None, "a is under way"
    core.slots.arrived("a")
    core.start(sequence("c"))
    assert core.foresee("b", SIZE, []) is None, "a request waits"
    assert batches(asynchronous=False).foresee("a", SIZE, []) is None


def step(core: BatchCore[Sequence]) -> StepPlan[Sequence]:
    """The next step, while the copies that have begun are running."""
    copies = Copies(LinkModel(bytes_per_s=1e3, layers=4), A10_MBGMV)
    for digest in core.slots.loading:
        copies.link.begin(digest, SIZE, 0)
    core.look(copies)
    return core.decide()


def test_a_copy_that_a_request_waits_for_does_not_queue_behind_a_foreseen_one() -> None:
    core = batches()
    core.foresee("a", SIZE, [])
    core.start(sequence("b"))
    plan = step(core)
    assert [seq.adapter for seq in plan.loads] == ["b"] and [digest for digest, _ in plan.evictions] == ["a"]
    assert list(core.slots.loading) == ["b"]
    core.check()


def test_a_foreseen_copy_continues_for_the_request_that_was_foreseen() -> None:
    core = batches()
    core.foresee("a", SIZE, [])
    for adapter in ("a", "b"):
        core.start(sequence(adapter))
    plan = step(core)
    assert not plan.evictions and list(core.slots.loading) == ["a", "b"]
    core.check()


def core_with(room: int) -> WorkerCore[str]:
    core: WorkerCore[str] = WorkerCore(View("w1", "", worker_limits()), HostTier(room, None), 100, foresight=Foresight())
    core.on(Registered({name: ref(name) for name in "abcdef"}), 0.0)
    return core


def served(core: WorkerCore[str], name: str, now_s: float) -> None:
    """A request on an adapter that comes to the device, from its arrival to its end."""
    actions = core.on(assign(f"{name}{now_s}", name), now_s)
    if isinstance(actions[-1], Load):
        actions = core.on(Loaded(name, SIZE, SIZE), now_s)
    entry = only_start([action for action in actions if not isinstance(action, Evict)])
    core.on(Stepped(device=[(name, True)]), now_s)
    core.on(Stepped(ended=[entry.key]), now_s)


def test_a_likely_adapter_comes_back_to_the_device_over_less_likely_ones() -> None:
    core = core_with(10 * SIZE)
    served(core, "b", 0.0)
    for at in range(1000, 1100, 10):
        served(core, "a", float(at))
    core.on(Stepped(device=[("a", False)]), 1091.0)
    assert core.on(Tick(), 1092.0) == [CopyIn("a", ["b"])]
    core.on(Stepped(device=[("a", True)]), 1093.0)
    assert core.on(Tick(), 1100.0) == []


def test_a_likely_adapter_comes_from_disk_to_host_memory_and_a_request_for_it_then_waits_for_that_load() -> None:
    core = core_with(SIZE)
    for at in range(0, 100, 10):
        served(core, "a", float(at))
    core.on(Stepped(device=[("a", False)]), 91.0)
    served(core, "b", 92.0)  # takes the room of a in host memory
    assert core.on(Tick(), 95.0)[-2:] == [Evict("b", "host"), Load(ref("a"), "disk")]
    assert core.on(Tick(), 95.5) == [], "it is on its way"
    assert core.on(assign("r", "a"), 96.0) == []
    only_start(core.on(Loaded("a", SIZE, SIZE), 97.0))
    core.check()


def in_the_twin(*, foresight: Switch, adapters: int, slots: int, every_s: float) -> Cluster:
    """600 requests, one every `every_s` seconds, for one adapter after another."""
    load = workload(rate=20.0, seconds=60.0)
    requests = np.arange(600)
    load = replace(
        load,
        arrival_s=requests * every_s + 0.25,
        adapter=requests % adapters,
        prompt_tokens=load.prompt_tokens[:600],
        output_tokens=np.full(600, 4),
    )
    link = LinkModel(bytes_per_s=1e9, layers=4)
    options = WorkerOptions(max_loras=slots, eviction="lru", foresight=foresight, cold_start="blocking")
    cluster = Cluster(load, [replace(spec(), link=link, options=options)], None)
    cluster.run()
    cluster.workers[0].engine.batches.check()
    return cluster


def test_adapters_that_are_asked_for_regularly_are_there_when_they_are_asked_for() -> None:
    without = in_the_twin(foresight="off", adapters=20, slots=16, every_s=2.0).metrics
    ahead, again = (in_the_twin(foresight="on", adapters=20, slots=16, every_s=2.0).metrics for _ in range(2))
    assert without.device_loads == 600 and without.foreseen == 0
    assert ahead.device_loads < 60 and ahead.foreseen + ahead.device_loads < 400
    assert (ahead.first_ps == again.first_ps).all()


def test_few_adapters_are_brought_where_they_leave_before_they_are_asked_for() -> None:
    assert in_the_twin(foresight="on", adapters=60, slots=8, every_s=0.5).metrics.foreseen < 60


# ---- auto: only where copies pay


def regular(foresight: Foresight, digest: str) -> None:
    """Requests every 10 s, the last one at 90 s."""
    for at in range(0, 100, 10):
        foresight.asked(digest, float(at))


def brings(foresight: Foresight, now_s: float, running: int) -> bool:
    return foresight.next(now_s, lambda digest: True, running=running) is not None


def judged(foresight: Foresight, *, came_true: bool, times: int) -> None:
    """So many adapters came, and were asked for, or left before."""
    for _ in range(times):
        foresight._tried_s["x"] = 0.0  # private: as if it had been chosen
        foresight.came("x")
        if came_true:
            foresight.asked("x", 0.0)
        else:
            foresight.left("x")


def test_adapters_come_beside_as_many_requests_as_the_forecasts_are_good_for() -> None:
    foresight = Foresight(careful=True)
    assert foresight.pays(10) and not foresight.pays(11), "half of them come true until more is known"
    judged(foresight, came_true=True, times=40)
    assert foresight.pays(60)
    judged(foresight, came_true=False, times=40)
    assert foresight.pays(0) and not foresight.pays(2)


def test_without_care_adapters_come_whatever_runs() -> None:
    foresight = Foresight()
    judged(foresight, came_true=False, times=40)
    assert foresight.pays(100)


def test_where_copies_do_not_pay_one_in_a_minute_finds_out_whether_they_do() -> None:
    foresight = Foresight(careful=True)
    regular(foresight, "a")
    assert brings(foresight, 95.0, running=50), "the first one"
    foresight.asked("a", 100.0)
    assert not brings(foresight, 105.0, running=50)
    assert brings(foresight, 105.0, running=1)
    for at in range(110, 170, 10):
        foresight.asked("a", float(at))
    assert brings(foresight, 166.0, running=50)


def test_a_forecast_fails_if_an_adapter_that_left_for_it_is_asked_for_first() -> None:
    foresight = Foresight(careful=True)
    foresight.asked("b", 0.0)
    for at in range(1000, 1100, 10):
        foresight.asked("a", float(at))
    assert foresight.next(1095.0, lambda digest: digest == "a", running=0) == "a"
    assert foresight.weaker("a", ["b"], 1095.0) == ["b"]
    foresight.left("b")
    foresight.came("a")
    foresight.asked("b", 1096.0)
    assert foresight.came_true < 0.5
    failed = foresight.came_true
    foresight.asked("b", 1097.0)
    assert foresight.came_true == failed, "it is counted once"


def test_foresight_says_how_good_its_forecasts_are() -> None:
    foresight = Foresight(careful=True)
    assert foresight.mechanism == Mechanism("on", "50% of its forecasts come true")
    brings(foresight, 0.0, running=40)
    assert foresight.mechanism == Mechanism("waiting", "50% of its forecasts come true, and 40 requests run")


def test_auto_brings_adapters_that_are_asked_for_regularly() -> None:
    without, auto = (in_the_twin(foresight=way, adapters=20, slots=16, every_s=2.0).metrics for way in ("off", "auto"))
    assert auto.device_loads < without.device_loads / 5
