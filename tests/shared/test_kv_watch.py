"""Promise: a watcher knows the whole present state again after any failure of the NATS server or the connection."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest

from motet.cli.nats_server import NatsServer
from motet.shared import leases, subjects
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.bus import Bus
from motet.shared.clock import unix_ms
from motet.shared.config import BusConfig
from motet.shared.errors import Unavailable
from motet.shared.kv import Bucket
from motet.shared.kv_watch import KvWatch
from motet.shared.leases import EXPIRY_S, LeaseHolder, LeaseWatch
from motet.shared.model import AdapterEntry, AdapterVersion
from tests.support import eventually


class Mirror:
    """A dictionary that follows a bucket."""

    def __init__(self, bus: Bus, pattern: str = ">") -> None:
        self.state: dict[str, bytes] = {}
        self.synced = 0
        self.watch = KvWatch(
            bus,
            subjects.KV_ADAPTERS,
            pattern,
            on_put=self.state.__setitem__,
            on_delete=lambda key: self.state.pop(key, None),
            on_synced=self.reconcile,
        )

    def reconcile(self, keys: set[str]) -> None:
        self.synced += 1
        for key in self.state.keys() - keys:
            del self.state[key]


def version(digest: str) -> bytes:
    return msgspec.json.encode(
        AdapterVersion(
            digest=digest,
            base_model="tiny",
            rank=4,
            modules=("q_proj",),
            layers=1,
            dtype="F32",
            size_bytes=1,
            source="test",
            created_unix_ms=1,
        )
    )


def entry(name: str, digest: str, number: int = 1) -> bytes:
    return msgspec.json.encode(AdapterEntry(name=name, digest=digest, version=number, updated_unix_ms=1))


async def test_a_stored_message_that_looks_like_the_servers_control_does_not_stop_the_watch(bus):
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    await bus.js.publish(f"$KV.{subjects.KV_ADAPTERS}.odd", b"1", headers={"Status": "100"})
    await kv.put("next", b"2")
    mirror = Mirror(bus)
    await asyncio.wait_for(mirror.watch.start(), timeout=5)
    assert mirror.state == {"odd": b"1", "next": b"2"}


async def test_an_empty_bucket_is_synced_at_once_and_changes_arrive_in_order(bus):
    mirror = Mirror(bus)
    await asyncio.wait_for(mirror.watch.start(), timeout=2)
    assert mirror.state == {} and mirror.watch.live
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    for n in range(50):
        await kv.put(f"k.{n % 7}", str(n).encode())
    await kv.delete("k.3")
    await eventually(
        lambda: mirror.state == {f"k.{n}": str(n if n == 0 else 42 + n).encode() for n in (1, 2, 4, 5, 6)} | {"k.0": b"49"}
    )


async def test_start_returns_with_the_present_state_and_only_of_the_pattern(bus):
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    for n in range(300):
        await kv.put(f"in.{n}", b"x")
    await kv.put("out.1", b"x")
    await kv.delete("in.7")
    mirror = Mirror(bus, "in.*")
    await mirror.watch.start()
    assert mirror.state.keys() == {f"in.{n}" for n in range(300) if n != 7}
    await mirror.watch.stop()


async def test_a_bucket_that_never_appears_is_unavailable(connect):
    mirror = Mirror(await connect("early"))
    with pytest.raises(Unavailable, match="motet_adapters"):
        await mirror.watch.start(wait_s=0.3)


async def test_a_raising_callback_does_not_end_the_watch(bus):
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    seen: list[str] = []

    def put(key: str, value: bytes) -> None:
        seen.append(key)
        raise RuntimeError("broken watcher")

    watch = KvWatch(bus, subjects.KV_ADAPTERS, ">", on_put=put, on_delete=seen.append, on_synced=lambda keys: None)
    await watch.start()
    await kv.put("a", b"1")
    await kv.put("b", b"1")
    await eventually(lambda: seen == ["a", "b"])


async def test_a_broker_crash_costs_no_change_even_if_keys_vanished_without_a_trace(bus, connect, nats_server: NatsServer):
    watcher = await connect("watcher")
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    for key in ("stays", "changes", "goes"):
        await kv.put(key, b"old")
    mirror = Mirror(watcher)
    await mirror.watch.start()

    nats_server.kill()
    await eventually(lambda: not watcher.connected)
    elsewhere = NatsServer(nats_server.data_dir)  # the same data under another port: the watcher cannot see this happen
    await elsewhere.start()
    other = await Bus.connect(BusConfig(nats_url=elsewhere.url), "other")
    try:
        kv2 = await other.key_value(subjects.KV_ADAPTERS)
        await kv2.put("changes", b"new")
        await kv2.put("appears", b"new")
        await kv2.delete("goes")
        await kv2.purge_deletes(olderthan=0)
    finally:
        await other.close()
        elsewhere.stop()
    await nats_server.start()
    await eventually(lambda: mirror.state == {"stays": b"old", "changes": b"new", "appears": b"new"} and mirror.watch.live)
    await eventually(lambda: bus.connected)
    await kv.put("later", b"x")
    await eventually(lambda: "later" in mirror.state)


async def test_a_consumer_that_the_server_lost_is_replaced(bus):
    mirror = Mirror(bus)
    await mirror.watch.start()
    stream = f"KV_{subjects.KV_ADAPTERS}"
    for consumer in await bus.js.consumers_info(stream):
        await bus.js.delete_consumer(stream, consumer.name)
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    await kv.put("unseen", b"x")
    await eventually(lambda: "unseen" in mirror.state and mirror.synced == 2)


async def test_a_stopped_watch_leaves_no_consumer_behind(bus):
    mirror = Mirror(bus)
    await mirror.watch.start()
    await mirror.watch.stop()

    async def none_left() -> bool:
        return not await bus.js.consumers_info(f"KV_{subjects.KV_ADAPTERS}")

    await eventually(none_left, within_s=20)


async def test_a_hung_broker_makes_a_watch_stale_but_loses_no_lease(connect, nats_server: NatsServer, bus):
    lost: list[str] = []
    holder = LeaseHolder(await connect("worker-1"), "worker", "w1", "first")
    await holder.start()
    watch = LeaseWatch(bus, "worker", lost.append)
    await watch.start()
    mirror = Mirror(bus)
    await mirror.watch.start()
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        await eventually(lambda: not mirror.watch.live)
        await asyncio.sleep(EXPIRY_S)  # time: silence longer than an expiry
        assert watch.ids() == ["w1"] and lost == []
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    await eventually(lambda: mirror.watch.live)
    assert watch.ids() == ["w1"] and lost == []
    await holder.release()
    await eventually(lambda: lost == ["w1"])


@pytest.mark.parametrize("with_lease", [True, False])
async def test_leases_that_cannot_be_renewed_do_not_end(connect, bus, monkeypatch, with_lease: bool):
    """While a cluster elects a leader for the bucket, which takes seconds, the watch works but no renewal gets through."""
    lost: list[str] = []
    holders = [LeaseHolder(await connect(name), kind, name, "first") for kind, name in (("worker", "w1"), ("gateway", "g1"))]
    for holder in holders:
        await holder.start()
    watch = LeaseWatch(bus, "worker", lost.append, holders[1] if with_lease else None)
    await watch.start()
    refused, put, refuses = asyncio.Event(), Bucket.put, {"worker.w1", "gateway.g1"}

    async def put_some(bucket: Bucket, key: str, value: bytes) -> int:
        if key in refuses:
            refused.set()
            raise TimeoutError
        return await put(bucket, key, value)

    monkeypatch.setattr(Bucket, "put", put_some)
    await refused.wait()
    await asyncio.sleep(EXPIRY_S + 1.0)  # time: past every expiry
    assert watch.ids() == ["w1"] and lost == []
    refuses.remove("gateway.g1")
    await eventually(lambda: lost == ["w1"])  # renewals get through again, so a lease without one has ended


@pytest.mark.parametrize("jump_s", [-3600, 3600])
async def test_a_clock_that_jumps_ends_no_lease(connect, bus, monkeypatch, jump_s: int):
    lost: list[str] = []
    holder = LeaseHolder(await connect("worker-1"), "worker", "w1", "first")
    await holder.start()
    watch = LeaseWatch(bus, "worker", lost.append)
    await watch.start()
    monkeypatch.setattr(leases, "unix_ms", lambda: unix_ms() + jump_s * 1000)
    late = LeaseWatch(bus, "worker", lost.append)
    await late.start()
    await asyncio.sleep(EXPIRY_S + 0.5)  # time: past every expiry
    assert watch.ids() == late.ids() == ["w1"] and lost == []


async def test_adapters_resolve_by_name_and_digest_and_changes_are_announced(bus):
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    await kv.put("version.d1", version("d1"))
    await kv.put("name.team/first", entry("team/first", "d1"))
    changes: list[int] = []
    watch = AdapterWatch(bus, on_change=lambda: changes.append(watch.names()))
    await watch.start()
    info = watch.resolve("team/first")
    assert info is not None and info.entry.digest == info.version.digest == "d1" and changes == []
    assert watch.resolve("nobody") is None and watch.by_digest("d2") is None

    await kv.put("version.d2", version("d2"))
    await kv.put("name.team/first", entry("team/first", "d2", 2))
    await kv.put("name.alias", entry("alias", "d1"))
    await kv.put("name.broken", b"{")
    await kv.put("name.orphan", entry("orphan", "d9"))
    await eventually(lambda: [i.entry.name for i in watch.all()] == ["alias", "team/first"] and len(changes) == 4)
    assert watch.resolve("team/first").entry.version == 2 and watch.resolve("orphan") is None

    await kv.delete("name.team/first")
    await kv.delete("version.d2")
    await eventually(lambda: watch.resolve("team/first") is None and watch.by_digest("d2") is None)
    await watch.stop()


async def test_adapters_deleted_while_the_broker_was_away_are_gone_afterwards(bus, connect, nats_server: NatsServer):
    kv = await bus.key_value(subjects.KV_ADAPTERS)
    for n in (1, 2):
        await kv.put(f"version.d{n}", version(f"d{n}"))
        await kv.put(f"name.n{n}", entry(f"n{n}", f"d{n}"))
    changes: list[int] = []
    watcher = await connect("gateway-1")
    watch = AdapterWatch(watcher, on_change=lambda: changes.append(1))
    await watch.start()
    nats_server.kill()
    await eventually(lambda: not watcher.connected)
    elsewhere = NatsServer(nats_server.data_dir)
    await elsewhere.start()
    other = await Bus.connect(BusConfig(nats_url=elsewhere.url), "other")
    try:
        kv2 = await other.key_value(subjects.KV_ADAPTERS)
        await kv2.delete("name.n1")
        await kv2.delete("version.d1")
        await kv2.purge_deletes(olderthan=0)
    finally:
        await other.close()
        elsewhere.stop()
    assert [i.entry.name for i in watch.all()] == ["n1", "n2"] and not watch.live  # stale, but it still answers
    await nats_server.start()
    await eventually(lambda: [i.entry.name for i in watch.all()] == ["n2"] and watch.live)
    assert watch.by_digest("d1") is None and len(changes) == 2
