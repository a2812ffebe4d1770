"""Promise: a NATS server that is connected but stores nothing, or whose buckets are damaged, is named in /ready."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from motet.cli.nats_server import NatsServer
from motet.shared import kv_watch, stores, subjects
from motet.shared.bus import Bus
from motet.shared.errors import Overloaded, Unavailable
from motet.shared.kv_watch import KvWatch
from motet.shared.leases import LeaseHolder
from motet.shared.stores import Stores
from motet.shared.telemetry import REGISTRY
from tests.support import eventually

LEASES = f"bucket {subjects.KV_LEASES}"


def fill_disk(server: NatsServer) -> None:
    """From now on the server's files cannot grow, as on a full disk. Its next process can write again."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def unwritable(stream: str) -> float | None:
    return REGISTRY.get_sample_value("motet_bus_unwritable", {"stream": stream})


async def test_a_server_that_keeps_the_write_error_of_a_full_disk_is_named_until_it_is_restarted(
    bus: Bus, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "UNSTORED_S", 1.0)
    lease = LeaseHolder(bus, "worker", "w1", "1")
    await lease.start()
    assert bus.troubles() == []
    fill_disk(nats_server)
    [trouble] = await eventually(bus.troubles)
    assert trouble.startswith(f"NATS has stored nothing in {LEASES} for ") and "until it is restarted" in trouble
    assert unwritable(LEASES) == 1
    assert await nats_server.write_errors() == [f"KV_{subjects.KV_LEASES}"]
    nats_server.stop()
    await nats_server.start()
    before_s = lease.renewed_s
    await eventually(lambda: lease.renewed_s > before_s)
    assert bus.troubles() == [] and unwritable(LEASES) == 0
    assert await nats_server.write_errors() == []


def test_one_failure_an_old_one_and_a_refusal_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(stores, "now_s", lambda: clock[0])
    seen = Stores()

    def write(error: Exception | None = None) -> None:
        try:
            with seen.writing("s"):
                if error is not None:
                    raise error
        except (Unavailable, Overloaded):
            pass

    for clock[0] in (0.0, 4.0):
        write(Unavailable("away"))
        assert not seen.unwritable(), "not for long"
    clock[0] = 6.0
    assert seen.unwritable() == {"s": 6.0}
    write(Overloaded("full"))
    assert not seen.unwritable(), "a refusal is an answer"
    write(Unavailable("away"))
    clock[0] = 30.0
    assert not seen.unwritable(), "one failure"
    write(Unavailable("away"))
    assert seen.unwritable()
    clock[0] += stores.FORGOTTEN_S
    assert not seen.unwritable(), "nobody has tried since"
    write(Unavailable("away"))
    assert not seen.unwritable(), "it begins anew"


async def test_a_bucket_whose_data_is_damaged_is_named_and_no_watch_waits_for_it_without_end(
    bus: Bus, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_watch, "UNREAD_S", 1.0)
    bucket = await bus.key_value(subjects.KV_KEYS)
    for name in ("a", "b", "c"):
        await bucket.put(name, b"v" * 60)
    seen: list[str] = []

    def watch() -> KvWatch:
        return KvWatch(
            bus,
            subjects.KV_KEYS,
            "*",
            on_put=lambda key, _: seen.append(key),
            on_delete=seen.append,
            on_synced=lambda _: None,
        )

    running = watch()
    await running.start()
    nats_server.stop()
    block = next((nats_server.data_dir / "jetstream").rglob(f"KV_{subjects.KV_KEYS}/msgs/1.blk"))
    _damage(block)
    await nats_server.start()
    [trouble] = await eventually(bus.troubles, within_s=20)
    assert "bucket motet_keys cannot be read" in trouble
    with pytest.raises(Unavailable, match=r"bucket motet_keys cannot be read.*damaged"):
        await watch().start(wait_s=1.5)
    await running.stop()
    assert bus.troubles() == []


async def test_a_bucket_that_is_gone_is_named(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_watch, "UNREAD_S", 0.5)
    watch = KvWatch(bus, subjects.KV_KEYS, "*", on_put=lambda *_: None, on_delete=lambda _: None, on_synced=lambda _: None)
    await watch.start()
    assert bus.troubles() == []
    await bus.js.delete_key_value(subjects.KV_KEYS)
    await eventually(lambda: any("bucket motet_keys cannot be read" in line for line in bus.troubles()))
    await watch.stop()


def _damage(block: Path) -> None:
    """Flip bytes of the first stored value."""
    data = bytearray(block.read_bytes())
    for i in range(40, 70):
        data[i] ^= 0xFF
    block.write_bytes(data)
    os.sync()
