"""Promise: one fetch per adapter for all requests, bytes that match their digest, and bounded memory."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from motet.services.worker import adapters
from motet.services.worker.adapter_files import AdapterFiles
from motet.shared import subjects
from motet.shared.adapter_blob import digest_of, read_site_index, write_site_blob
from motet.shared.errors import AdapterNotFound, BadRequest, InvalidAdapter, TooLarge, Unavailable, WorkerFull
from motet.shared.model import AdapterRef
from tests.services.worker.support_adapters import AdapterTiers
from tests.support import eventually

KIB = 1024


@dataclass
class Parsed:
    """A stand-in for the host copy. The tiers only keep it."""

    data: bytes
    widened: int = 1  # times as large in memory

    @property
    def nbytes(self) -> int:
        return len(self.data) * self.widened

    @property
    def blob_bytes(self) -> int:
        return len(self.data)


def blob(seed: int, size_bytes: int = 64 * KIB) -> tuple[AdapterRef, bytes]:
    data = hashlib.shake_128(seed.to_bytes(4, "little")).digest(size_bytes)
    return AdapterRef(name=f"a{seed}", digest=hashlib.sha256(data).hexdigest(), rank=8, size_bytes=size_bytes), data


def count_hashes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows by one with each hashed file."""
    hashed: list[object] = []
    real = hashlib.file_digest

    def counted(file, name):
        hashed.append(file)
        return real(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return hashed


class Bench:
    """Tiers over a real object store, counting what they read from it."""

    def __init__(self, bus, directory: Path, *, disk_bytes: int = 1 << 24, host_bytes: int = 1 << 24) -> None:
        self.bus, self.directory = bus, directory
        self.parsed = 0
        self.widened = 1
        self.changes: list[str] = []
        self.tiers = AdapterTiers(
            bus,
            AdapterFiles(str(directory)),
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            parse=self._parse,
            on_change=self.changes.append,
        )
        self.tier = self.tiers.tier
        self.fetched: list[str] = []
        fetch = self.tiers.store.fetch

        async def counted(ref: AdapterRef) -> Parsed:
            self.fetched.append(ref.digest)
            return await fetch(ref)

        self.tiers.store.fetch = counted

    def _parse(self, path: Path, digest: str) -> Parsed:
        self.parsed += 1
        data = path.read_bytes()
        if data.startswith(b"bad"):
            raise InvalidAdapter("does not fit the model")
        return Parsed(data, self.widened)

    async def put(self, ref: AdapterRef, data: bytes) -> None:
        store = await self.bus.object_store(subjects.BLOBS)
        await store.put(ref.digest, data)

    def file(self, ref: AdapterRef) -> Path:
        return self.directory / f"{ref.digest}.safetensors"


@pytest.fixture
def bench(bus, tmp_path) -> Bench:
    return Bench(bus, tmp_path / "adapters")


async def test_a_blob_of_sites_goes_through_all_tiers_as_any_other(bench):
    pairs = {0: (1.0, np.ones((2, 3), np.float32), np.ones((5, 2), np.float32))}
    data = write_site_blob({"unet.attn1.to_q 3x5": (pairs, 4)}, dtype="F32")
    ref = AdapterRef(name="style", digest=digest_of(data), rank=2, size_bytes=len(data))
    await bench.put(ref, data)
    copy = await bench.tiers.acquire(ref)
    assert copy.data == data == bench.file(ref).read_bytes() and read_site_index(copy.data, len(data)).sites == 1
    bench.tiers.release(ref.digest)
    bench.file(ref).write_bytes(data[:-1] + b"\x01")
    again = Bench(bench.bus, bench.directory)
    assert (await again.tiers.acquire(ref)).data == data and again.fetched == [ref.digest]


async def test_twenty_waiting_requests_cause_one_fetch_and_all_hold_the_same_copy(bench):
    ref, data = blob(1, 700 * KIB)
    await bench.put(ref, data)
    copies = await asyncio.gather(*(bench.tiers.acquire(ref) for _ in range(20)))
    assert bench.fetched == [ref.digest] and bench.parsed == 1
    assert all(copy is copies[0] for copy in copies) and copies[0].data == data
    assert bench.tier.holders(ref.digest) == 20
    assert bench.tier.tier(ref.digest) == "host" and bench.file(ref).read_bytes() == data
    for _ in range(20):
        bench.tiers.release(ref.digest)
    assert bench.tier.holders(ref.digest) == 0


async def test_a_corrupted_file_is_fetched_again_and_a_good_one_is_not(bench, tmp_path):
    ref, data = blob(1)
    await bench.put(ref, data)
    bench.directory.mkdir(exist_ok=True)
    bench.file(ref).write_bytes(data[:-1] + b"\0")
    restarted = Bench(bench.bus, bench.directory)
    assert restarted.tier.tier(ref.digest) == "disk"
    assert (await restarted.tiers.acquire(ref)).data == data
    assert restarted.fetched == [ref.digest] and bench.file(ref).read_bytes() == data
    again = Bench(bench.bus, bench.directory)
    assert (await again.tiers.acquire(ref)).data == data
    assert again.fetched == []


async def test_a_file_is_hashed_when_it_is_fetched_and_not_when_it_is_loaded_again(bus, tmp_path, monkeypatch):
    bench = Bench(bus, tmp_path / "adapters", host_bytes=70 * KIB)
    hashed = count_hashes(monkeypatch)
    refs = []
    for seed in (1, 2):
        ref, data = blob(seed)
        await bench.put(ref, data)
        refs.append(ref)
    for ref in refs * 3:  # there is room for one: each takes the other's place
        await bench.tiers.acquire(ref)
        bench.tiers.release(ref.digest)
    assert bench.parsed == 6 and len(bench.fetched) == 2
    assert len(hashed) == 2
    restarted = Bench(bus, bench.directory)
    await restarted.tiers.acquire(refs[0])
    assert len(hashed) == 3, "a process hashes what it finds once"


def cut_short(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.truncate(len(data) // 2)


def altered(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(len(data) // 2)
        file.write(bytes([data[len(data) // 2] ^ 1]))


def replaced(path: Path, data: bytes) -> None:
    written = path.stat().st_mtime_ns
    other = path.with_name("other")
    other.write_bytes(bytes(len(data)))
    os.utime(other, ns=(written, written))
    other.replace(path)


@pytest.mark.parametrize("damage", [cut_short, altered, replaced, lambda path, _: path.unlink()])
async def test_a_file_that_was_damaged_between_two_loads_is_fetched_again(bus, tmp_path, damage):
    bench = Bench(bus, tmp_path / "adapters", host_bytes=70 * KIB)
    (ref, data), (other, other_data) = blob(1), blob(2)
    for one, content in ((ref, data), (other, other_data)):
        await bench.put(one, content)
        await bench.tiers.acquire(one)  # the second takes the first one's place in host memory
        bench.tiers.release(one.digest)
    damage(bench.file(ref), data)
    assert (await bench.tiers.acquire(ref)).data == data
    assert bench.fetched == [ref.digest, other.digest, ref.digest]
    assert bench.file(ref).read_bytes() == data


async def test_other_bytes_under_a_digest_in_the_store_are_never_used(bench):
    ref, _ = blob(1)
    _, other = blob(2)
    await bench.put(ref, other)
    with pytest.raises(Unavailable, match="does not have digest"):
        await bench.tiers.acquire(ref)
    assert bench.tier.tier(ref.digest) is None and list(bench.directory.iterdir()) == []


async def test_a_failed_load_fails_the_waiting_requests_and_a_later_request_tries_again(bench):
    ref, data = blob(1)
    results = await asyncio.gather(*(bench.tiers.acquire(ref) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in results] == [AdapterNotFound] * 3
    await bench.put(ref, data)
    assert (await bench.tiers.acquire(ref)).data == data


async def test_a_blob_that_does_not_fit_the_model_fails_alone_and_gives_its_memory_back(bench):
    data = b"bad" + bytes(KIB)
    ref = AdapterRef(name="bad", digest=hashlib.sha256(data).hexdigest(), rank=8, size_bytes=len(data))
    good, good_data = blob(1)
    await bench.put(ref, data)
    await bench.put(good, good_data)
    results = await asyncio.gather(bench.tiers.acquire(ref), bench.tiers.acquire(good), return_exceptions=True)
    assert isinstance(results[0], InvalidAdapter) and results[1].data == good_data
    assert bench.tier.host_used_bytes == good.size_bytes and bench.tier.reserved_bytes == 0


async def test_the_copy_released_longest_ago_leaves_host_memory_first(bus, tmp_path):
    bench = Bench(bus, tmp_path / "adapters", host_bytes=3 * 64 * KIB)
    refs = []
    for seed in range(4):
        ref, data = blob(seed)
        await bench.put(ref, data)
        refs.append(ref)
    for ref in refs[:3]:
        await bench.tiers.acquire(ref)
    for place in (1, 0, 2):
        bench.tiers.release(refs[place].digest)
    await bench.tiers.acquire(refs[3])
    assert [bench.tier.tier(ref.digest) for ref in refs] == ["host", "disk", "host", "host"]


async def test_host_memory_evicts_copies_without_holders_and_waits_for_the_others(bus, tmp_path):
    bench = Bench(bus, tmp_path / "adapters", host_bytes=150 * KIB)
    refs = []
    for seed in range(3):
        ref, data = blob(seed)
        await bench.put(ref, data)
        refs.append(ref)
    await bench.tiers.acquire(refs[0])
    bench.tiers.release(refs[0].digest)
    await bench.tiers.acquire(refs[1])
    await bench.tiers.acquire(refs[2])
    assert [bench.tier.tier(ref.digest) for ref in refs] == ["disk", "host", "host"]
    third = asyncio.ensure_future(bench.tiers.acquire(refs[0]))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(third), 0.1)
    bench.tiers.release(refs[1].digest)
    await asyncio.wait_for(third, 5)
    assert bench.tier.host_used_bytes == 2 * 64 * KIB
    assert [bench.tier.tier(ref.digest) for ref in refs] == ["host", "disk", "host"]


async def test_copies_that_are_cast_to_a_wider_type_count_as_what_they_take(bus, tmp_path):
    bench = Bench(bus, tmp_path / "adapters", host_bytes=200 * KIB)
    bench.widened = 2
    refs = []
    for seed in range(2):
        ref, data = blob(seed)
        await bench.put(ref, data)
        await bench.tiers.acquire(ref)
        bench.tiers.release(ref.digest)
        refs.append(ref)
    assert [bench.tier.tier(ref.digest) for ref in refs] == ["disk", "host"]
    assert bench.tier.host_used_bytes == 2 * 64 * KIB and bench.tier.disk_used_bytes == 2 * 64 * KIB


async def test_an_adapter_larger_than_the_host_budget_is_refused_with_both_numbers(bus, tmp_path):
    bench = Bench(bus, tmp_path / "adapters", host_bytes=10 * KIB)
    ref, data = blob(1)
    await bench.put(ref, data)
    with pytest.raises(TooLarge, match=r"65536.*10240"):
        await bench.tiers.acquire(ref)


async def test_the_disk_tier_stays_within_its_size_and_forgets_the_oldest(bus, tmp_path):
    bench = Bench(bus, tmp_path / "adapters", disk_bytes=140 * KIB, host_bytes=70 * KIB)
    refs = []
    for seed in range(3):
        ref, data = blob(seed)
        await bench.put(ref, data)
        await bench.tiers.acquire(ref)
        bench.tiers.release(ref.digest)
        refs.append(ref)
    assert sorted(path.name for path in bench.directory.iterdir()) == sorted(bench.file(ref).name for ref in refs[1:])
    assert bench.tier.tier(refs[0].digest) is None


async def test_dropping_an_adapter_in_use_waits_for_its_last_holder(bench):
    ref, data = blob(1)
    await bench.put(ref, data)
    await bench.tiers.acquire(ref)
    await bench.tiers.acquire(ref)
    bench.tiers.drop(ref.digest)
    bench.tiers.release(ref.digest)
    assert bench.tier.tier(ref.digest) == "host"
    bench.tiers.release(ref.digest)
    assert bench.tier.tier(ref.digest) is None and not bench.file(ref).exists()
    assert bench.changes[-1] == ref.digest


async def test_what_is_no_digest_names_no_file(bench):
    outside = bench.directory.parent / "outside.safetensors"
    outside.write_bytes(b"another program's file")
    bench.tiers.drop("../outside")
    bench.tiers.drop("x\x00y" * 100)
    assert outside.exists()
    ref, _ = blob(1)
    with pytest.raises(BadRequest, match="not a digest"):
        await bench.tiers.acquire(msgspec.structs.replace(ref, digest="../outside"))


async def test_a_version_that_is_asked_for_again_before_its_last_holder_leaves_stays(bench):
    ref, data = blob(1)
    await bench.put(ref, data)
    await bench.tiers.acquire(ref)
    bench.tiers.drop(ref.digest)
    await bench.tiers.acquire(ref)
    bench.tiers.release(ref.digest)
    bench.tiers.release(ref.digest)
    assert bench.tier.tier(ref.digest) == "host"


async def test_a_cancelled_waiter_does_not_keep_the_adapter_held(bench):
    ref, data = blob(1, 700 * KIB)
    await bench.put(ref, data)
    waiting = [asyncio.ensure_future(bench.tiers.acquire(ref)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert bench.tier.holders(ref.digest) == 2
    lonely, data = blob(2, 700 * KIB)
    await bench.put(lonely, data)
    task = asyncio.ensure_future(bench.tiers.acquire(lonely))
    await asyncio.sleep(0)
    task.cancel()
    await eventually(lambda: bench.tier.tier(lonely.digest) == "host")
    assert bench.tier.holders(lonely.digest) == 0


async def test_losing_the_store_in_the_middle_is_unavailable_and_leaves_no_partial_file(bench, nats_server, monkeypatch):
    monkeypatch.setattr("motet.services.worker.adapters.FETCH_BASE_S", 0.5)
    (ref, data), (earlier, content) = blob(1), blob(2)
    await bench.put(ref, data)
    await bench.put(earlier, content)
    await bench.tiers.acquire(earlier)  # it opens the store
    files = list(bench.directory.iterdir())
    nats_server.kill()
    await eventually(lambda: not bench.bus.connected)
    with pytest.raises(Unavailable, match="cannot be fetched"):
        await bench.tiers.acquire(ref)
    assert list(bench.directory.iterdir()) == files
    await nats_server.start()
    await eventually(lambda: bench.bus.connected, within_s=15)
    assert (await bench.tiers.acquire(ref)).data == data


async def test_a_private_directory_is_gone_afterwards_and_a_given_one_stays(bus, tmp_path):
    private = AdapterFiles("")
    directory = private.path("x").parent
    assert directory.is_dir()
    private.close()
    assert not directory.exists()
    given = AdapterFiles(str(tmp_path / "given"))
    given.close()
    assert (tmp_path / "given").is_dir()


async def test_downloads_that_a_crash_cut_short_are_removed_and_those_under_way_are_not(bus, tmp_path):
    directory = tmp_path / "adapters"
    directory.mkdir()
    left, running = directory / ".aa.1.part", directory / ".bb.2.part"
    left.write_bytes(b"half")
    with running.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another worker that shares the directory
        Bench(bus, directory)
        assert not left.exists() and running.exists()
    Bench(bus, directory)
    assert not running.exists()


async def test_a_download_under_way_is_locked(bench):
    ref, data = blob(1)
    await bench.put(ref, data)
    gate, read = asyncio.Event(), adapters.read_object

    async def gated(*args) -> None:
        await gate.wait()
        await read(*args)

    adapters.read_object = gated
    try:
        task = asyncio.ensure_future(bench.tiers.acquire(ref))
        [partial] = await eventually(lambda: list(bench.directory.glob("*.part")))
        AdapterFiles(str(bench.directory))  # a second worker starts
        assert partial.exists()
        gate.set()
        assert (await task).data == data
    finally:
        adapters.read_object = read


class SmallDisk:
    """A file system that holds `size_bytes`: what does not fit fails as on a full disk, in the middle of the download."""

    def __init__(self, bench: Bench, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench, self.size_bytes, self.read = bench, size_bytes, adapters.read_object
        monkeypatch.setattr(adapters, "read_object", self.fill)

    async def fill(self, bus, store, name, sink) -> None:
        used = sum(path.stat().st_size for path in self.bench.directory.glob("*.safetensors"))
        if used + (await store.info(name)).size > self.size_bytes:
            sink.write(b"x" * (self.size_bytes - used))
            sink.flush()
            raise OSError(errno.ENOSPC, "No space left on device", "/srv/cache/secret")
        sink.seek(0)
        await self.read(bus, store, name, sink)


async def test_a_full_disk_costs_the_file_used_longest_ago_and_never_one_that_is_mapped(bench, monkeypatch):
    refs = []
    for seed in range(5):
        ref, data = blob(seed)
        await bench.put(ref, data)
        refs.append(ref)
    SmallDisk(bench, 2 * 64 * KIB, monkeypatch)
    for ref in refs[:2]:
        await bench.tiers.acquire(ref)
        bench.tiers.release(ref.digest)
    await bench.tiers.acquire(refs[1])
    await bench.tiers.acquire(refs[2])
    assert [bench.tier.tier(ref.digest) for ref in refs[:3]] == [None, "host", "host"]
    with pytest.raises(Unavailable, match="this worker's disk is full, and the adapters on it are in use") as full:
        await bench.tiers.acquire(refs[3])
    assert "/srv" not in full.value.message and not isinstance(full.value, WorkerFull), "it has room later"
    assert not list(bench.directory.glob("*.part")) and bench.tier.reserved_bytes == 0
    bench.tiers.release(refs[1].digest)
    assert (await bench.tiers.acquire(refs[3])).data == blob(3)[1]
    assert bench.tier.tier(refs[1].digest) is None and refs[1].digest in bench.changes


async def test_room_is_made_before_a_download_that_the_disk_cannot_take(bench, monkeypatch):
    first, data = blob(1)
    await bench.put(first, data)
    await bench.tiers.acquire(first)
    bench.tiers.release(first.digest)
    second, data = blob(2)
    await bench.put(second, data)
    monkeypatch.setattr(AdapterFiles, "free_bytes", property(lambda files: 0 if files.path(first.digest).exists() else 1 << 30))
    assert (await bench.tiers.acquire(second)).data == data
    assert not bench.file(first).exists() and bench.tier.tier(first.digest) is None


async def test_an_adapter_that_the_disk_can_never_take_costs_no_other_its_place(bench, monkeypatch):
    served = []
    for seed in range(2):
        ref, data = blob(seed)
        await bench.put(ref, data)
        await bench.tiers.acquire(ref)
        bench.tiers.release(ref.digest)
        served.append(ref)
    huge, data = blob(9, 300 * KIB)
    await bench.put(huge, data)
    SmallDisk(bench, 3 * 64 * KIB, monkeypatch)
    for free_bytes in (64 * KIB, 1 << 30):  # what the file system says; the second one has a quota
        monkeypatch.setattr(AdapterFiles, "free_bytes", free_bytes)
        with pytest.raises(WorkerFull, match=r"this worker's disk is full; it has 307200 bytes, 65536 are free"):
            await bench.tiers.acquire(huge)
        assert [bench.tier.tier(ref.digest) for ref in served] == ["host", "host"]
        assert all(bench.file(ref).exists() for ref in served)
