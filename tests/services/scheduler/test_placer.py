"""Promise: workers are told which adapters to keep by recent demand, by one scheduler, and not again while nothing changes."""

from __future__ import annotations

from collections.abc import Callable

from motet.shared import subjects
from motet.shared.bus import decode, encode
from motet.shared.clock import now_s
from motet.shared.kv import Bucket
from motet.shared.model import AdapterRef
from motet.shared.placement import Placement, PlacementWatch
from motet.shared.wire.homes import PlannedAdapter, SetHomes
from tests.services.scheduler.support import knows, submit
from tests.support import eventually
from tests.support_worker import generate_request, worker_limits

LIMITS = worker_limits(pin_slots=2, pin_bytes=1 << 20)


async def placed(bus, *worker_ids: str) -> Callable[[], dict[str, tuple[str, ...]]]:
    watch = PlacementWatch(bus, ">")
    await watch.start()
    return lambda: {worker_id: watch.digests(worker_id) for worker_id in worker_ids}


async def test_an_adapter_that_is_asked_for_is_placed_on_workers(bus, schedule, hire):
    for name in ("w1", "w2"):
        await hire(name, limits=LIMITS)
    service = await schedule(placement="on", place_s=0.5)
    await knows(service, "w1", "w2")
    now = await placed(bus, "w1", "w2")
    request = generate_request("r0", rank=8)
    for number in range(4):
        await submit(bus, generate_request(f"r{number}", rank=8))
    digest = request.adapter.digest
    await eventually(lambda: any(digest in digests for digests in now().values()))
    bucket = await Bucket.open(bus, subjects.KV_PLACEMENT)
    holder = next(name for name, digests in now().items() if digests)
    first = await bucket.get(holder)
    assert decode(first.value, Placement).owner.startswith(service.id)
    await submit(bus, generate_request("r9", rank=8))
    await service.placer.place()
    assert (await bucket.get(holder)).revision == first.revision, "what has not changed is not written again"


async def test_every_adapter_has_a_home_and_a_copy_only_where_a_worker_has_room_for_it(bus, schedule, hire):
    """The adapters have 64 KiB each. One worker may hold two, and the other has memory for one."""
    roomy, small = (
        worker_limits(pin_slots=2, adapter_bytes_total=1 << 20),
        worker_limits(pin_slots=8, adapter_bytes_total=100 << 10),
    )
    await hire("roomy", limits=roomy)
    await hire("small", limits=small)
    service = await schedule(placement="on", place_s=0.5)
    await knows(service, "roomy", "small")
    now = await placed(bus, "roomy", "small")
    for number in range(6):
        adapter = AdapterRef(name=f"a{number % 3}", digest=f"d{number % 3}", rank=8, size_bytes=64 << 10)
        await submit(bus, generate_request(f"r{number}", adapter=adapter))
    await eventually(lambda: {one for digests in now().values() for one in digests} == {"d0", "d1", "d2"})
    assert len(now()["roomy"]) <= 2, "two adapters, at home there or copies"


async def test_a_worker_that_comes_gets_homes_within_a_second_and_one_that_leaves_gives_its_own_to_others(bus, schedule, hire):
    """The next decision would be made in an hour."""
    first = await hire("w1", limits=LIMITS)
    service = await schedule(placement="on", place_s=3600.0)
    await knows(service, "w1")
    now = await placed(bus, "w1", "w2")
    for number in range(8):
        adapter = AdapterRef(name=f"a{number % 4}", digest=f"d{number % 4}", rank=8, size_bytes=64 << 10)
        await submit(bus, generate_request(f"r{number}", adapter=adapter))
    await eventually(lambda: service.planner.mine)
    await hire("w2", limits=LIMITS)
    await knows(service, "w2")
    came_s = now_s()
    await eventually(lambda: bool(now()["w2"]))
    assert now_s() < came_s + 1.0
    assert set(now()["w1"]) | set(now()["w2"]) == {"d0", "d1", "d2", "d3"}
    await first.goodbye()
    await eventually(lambda: set(now()["w2"]) == {"d0", "d1", "d2", "d3"} and not now()["w1"])


async def test_every_scheduler_knows_homes_when_it_decides(bus, schedule, hire):
    await hire("w1", limits=LIMITS)
    other = await schedule(placement="on", place_s=3600.0)
    await knows(other, "w1")
    bucket = await Bucket.open(bus, subjects.KV_PLACEMENT)
    await bucket.put("w1", encode(Placement(owner="s", digests=("d8",), since_unix_ms=0)))
    state = other.cluster.state
    await eventually(lambda: (rows := state.homes.of("d8")) is not None and list(rows) == [state.row("w1")])


async def test_a_worker_that_is_gone_loses_its_placement(bus, schedule, hire):
    bucket = await Bucket.open(bus, subjects.KV_PLACEMENT)
    await hire("w1", limits=LIMITS)
    service = await schedule(placement="on", place_s=0.5)
    await knows(service, "w1")
    await bucket.put("gone", encode(Placement(owner="s", digests=("d",), since_unix_ms=0)))

    async def vanished() -> bool:
        return await bucket.get("gone") is None

    await eventually(vanished)


async def test_nothing_is_placed_while_placement_is_off(bus, schedule, hire):
    bucket = await Bucket.open(bus, subjects.KV_PLACEMENT)
    await hire("w1", limits=LIMITS)
    service = await schedule(placement="off", place_s=0.1)
    await knows(service, "w1")
    asked_s = now_s()
    await submit(bus, generate_request("r0", rank=8))
    await eventually(lambda: now_s() > asked_s + 1.0)  # ten times as long as another scheduler takes
    assert await bucket.get("w1") is None


async def test_the_homes_of_a_plan_go_where_most_of_them_is_loaded_and_stay_when_homes_are_planned_again(bus, schedule, hire):
    for name in ("w1", "w2"):
        await hire(name, limits=LIMITS)
    service = await schedule(placement="on", place_s=3600.0)
    await knows(service, "w1", "w2")
    now = await placed(bus, "w1", "w2")
    await eventually(lambda: service.planner.mine)
    service.cluster.state.replace_adapters("w2", {"d0": "device", "d1": "device"})
    planned = [PlannedAdapter(f"d{number}", 8, 64 << 10) for number in range(4)]
    await bus.publish(subjects.HOMES, SetHomes(base_model="demo", workers=[planned[:2], planned[2:]]))
    await eventually(lambda: now() == {"w1": ("d2", "d3"), "w2": ("d0", "d1")})
    await submit(bus, generate_request("r0", rank=8))
    await service.placer.place()
    homes = now()
    assert set(homes["w1"]) >= {"d2", "d3"} and set(homes["w2"]) >= {"d0", "d1"}, homes


async def test_a_worker_gets_no_home_of_a_rank_that_it_cannot_load_while_another_one_can(bus, schedule, hire):
    await hire("low", limits=worker_limits(max_lora_rank=16))
    await hire("high", limits=worker_limits(max_lora_rank=64))
    service = await schedule(placement="on", place_s=3600.0)
    await knows(service, "low", "high")
    now = await placed(bus, "low", "high")
    await eventually(lambda: service.planner.mine)
    service.cluster.state.replace_adapters("low", {"d64": "device"})
    planned = [[PlannedAdapter("d64", 64, 1 << 20)], [PlannedAdapter("d8", 8, 1 << 20)]]
    await bus.publish(subjects.HOMES, SetHomes(base_model="demo", workers=planned))
    await eventually(lambda: now() == {"low": ("d8",), "high": ("d64",)})


async def test_a_plan_with_more_workers_than_serve_changes_nothing(bus, schedule, hire):
    await hire("w1", limits=LIMITS)
    service = await schedule(placement="on", place_s=3600.0)
    await knows(service, "w1")
    now = await placed(bus, "w1")
    await eventually(lambda: service.planner.mine)
    one, two = ([PlannedAdapter(name, 8, 1 << 20)] for name in ("d1", "d2"))
    await bus.publish(subjects.HOMES, SetHomes(base_model="demo", workers=[one, two]))
    await bus.publish(subjects.HOMES, SetHomes(base_model="demo", workers=[two]))
    await eventually(lambda: now() == {"w1": ("d2",)})
