"""Promise: a worker on the bus answers every request it took exactly once, whatever happens around it.

Real nats-server, real engine, a tiny random Llama; what tokens are right is asked of transformers and peft.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.config import WorkerConfig
from services.worker.service import WorkerService
from shared import subjects
from shared.adapter_blob import digest_of, read_index
from shared.errors import from_info
from shared.leases import LeaseHolder, LeaseWatch
from shared.messages import (
    Accepted,
    AssignReply,
    Cancel,
    Drain,
    GenerateRequest,
    LoadAdapter,
    Refused,
    StreamItem,
    TokenFrame,
    UnloadAdapter,
    WorkerSnapshot,
    WorkerState,
    pack_tokens,
)
from shared.model import AdapterEntry, AdapterRef, AdapterVersion, SamplingParams, Slo
from tests.services.worker.test_state import apply, as_sets
from tests.support import eventually
from tests.support_models import AdapterFixture, Oracle, make_adapters, make_checkpoint, random_prompts

BASE = "tiny"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint("llama2", tmp_path_factory.mktemp("worker-model"))


@pytest.fixture(scope="session")
def adapters(checkpoint, tmp_path_factory) -> list[AdapterFixture]:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("worker-adapters"))


@pytest.fixture(scope="session")
def oracle(checkpoint, adapters) -> Oracle:
    return Oracle(checkpoint, adapters)


class Mesh:
    """The gateway's, the scheduler's and the registry's side of one worker's subjects."""

    def __init__(self, bus) -> None:
        self.bus = bus
        self.frames: dict[str, list[TokenFrame]] = defaultdict(list)
        self.states: list[WorkerState] = []

    async def listen(self, worker_id: str) -> None:
        async def keep(msg) -> None:
            gateway_id = msg.subject.rsplit(".", 1)[1]
            self.frames[gateway_id].append(msgspec.msgpack.decode(msg.data, type=TokenFrame))

        await self.bus.nc.subscribe(subjects.STREAMS, cb=keep)
        await self.bus.subscribe(subjects.state(worker_id), WorkerState, self.states.append)

    async def publish_adapter(self, adapter: AdapterFixture) -> AdapterRef:
        """What the registry does: blob, version, name."""
        blob, index = adapter.blob, read_index(adapter.blob, len(adapter.blob))
        store = await self.bus.object_store(subjects.BLOBS)
        kv = await self.bus.key_value(subjects.KV_ADAPTERS)
        digest = digest_of(blob)
        version = AdapterVersion(
            digest=digest,
            base_model=BASE,
            rank=index.rank,
            modules=index.modules,
            layers=index.layers,
            dtype=index.dtype,
            size_bytes=len(blob),
            source="test",
            created_unix_ms=0,
        )
        entry = AdapterEntry(name=adapter.name, digest=digest, version=1, updated_unix_ms=0)
        await store.put(digest, blob)
        await kv.put(f"version.{digest}", msgspec.json.encode(version))
        await kv.put(f"name.{adapter.name}", msgspec.json.encode(entry))
        return AdapterRef(name=adapter.name, digest=digest, rank=index.rank, size_bytes=len(blob))

    async def delete_adapter(self, ref: AdapterRef) -> None:
        kv = await self.bus.key_value(subjects.KV_ADAPTERS)
        await kv.delete(f"name.{ref.name}")
        await kv.delete(f"version.{ref.digest}")

    def items(self, request_id: str, epoch: int = 0) -> list[StreamItem]:
        every = [item for frames in self.frames.values() for frame in frames for item in frame.items]
        return [item for item in every if item.request_id == request_id and item.epoch == epoch]

    def tokens(self, request_id: str, epoch: int = 0) -> list[int]:
        """All tokens, after checking that their indices follow each other."""
        tokens: list[int] = []
        items = self.items(request_id, epoch)
        start = items[0].index if items else 0
        for item in items:
            assert item.index == start + len(tokens), f"index {item.index} after {start + len(tokens)} tokens"
            tokens += item.tokens
        return tokens

    def end(self, request_id: str, epoch: int = 0) -> StreamItem | None:
        ends = [item for item in self.items(request_id, epoch) if item.finish]
        assert len(ends) <= 1, "a request ends once"
        return ends[0] if ends else None

    async def ended(self, request_id: str, epoch: int = 0, within_s: float = 20.0) -> StreamItem:
        return await eventually(lambda: self.end(request_id, epoch), within_s=within_s)


def generate(ids: list[int], *, max_tokens: int = 8, gateway_id: str = "g1", **changed: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": secrets.token_hex(6),
        "gateway_id": gateway_id,
        "base_model": BASE,
        "prompt": pack_tokens(ids),
        "sampling": SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        "slo": Slo(),
    }
    return GenerateRequest(**fields | changed)


class Running:
    """A worker service in this process, and how to talk to it."""

    def __init__(self, service: WorkerService, mesh: Mesh) -> None:
        self.service, self.mesh = service, mesh
        self.left = False
        self.fetches: list[str] = []

    async def assign(self, request: GenerateRequest) -> Accepted | Refused:
        return await self.mesh.bus.request(subjects.assign(self.service.worker_id), request, AssignReply, timeout_s=5.0)

    async def refusal(self, request: GenerateRequest) -> Exception:
        reply = await self.assign(request)
        assert isinstance(reply, Refused), reply
        return from_info(reply.error)

    async def accepted(self, *requests: GenerateRequest) -> None:
        for reply in await asyncio.gather(*(self.assign(request) for request in requests)):
            assert isinstance(reply, Accepted), reply

    async def control(self, message: msgspec.Struct) -> None:
        await self.mesh.bus.publish(subjects.control(self.service.worker_id), message)

    @property
    def engine(self) -> Any:
        return self.service._assembly.engine

    def slow_down(self, step_s: float) -> None:
        """Every step takes at least this long from now on."""
        step = self.engine.step

        def slow(now_s: float) -> Any:
            time.sleep(step_s)
            return step(now_s)

        self.engine.step = slow

    def gate_fetches(self) -> threading.Event:
        """Fetches from the object store wait for the returned event, and are counted in `fetches`."""
        gate = asyncio.Event()
        fetch = self.service.adapters.tiers._fetch

        async def gated(ref: AdapterRef) -> bytes:
            self.fetches.append(ref.digest)
            await gate.wait()
            return await fetch(ref)

        self.service.adapters.tiers._fetch = gated
        return gate


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(bus, nats_url, checkpoint, tmp_path) -> AsyncIterator[Start]:
    """Starts workers; stops those that are still there afterwards."""
    started: list[Running] = []

    async def start_worker(**changed: Any) -> Running:
        options: dict[str, Any] = {
            "nats_url": nats_url,
            "model": str(checkpoint),
            "served_model_name": BASE,
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "block_size": 8,
            "kv_blocks": 400,
            "max_running": 16,
            "max_waiting": 16,
            "lora_memory_mib": 8,
            "adapter_cache_dir": str(tmp_path / "adapters"),
        }
        mesh = Mesh(bus)
        running: Running

        def leave() -> None:
            running.left = True

        service = WorkerService(WorkerConfig(**options | changed), leave)
        running = Running(service, mesh)
        await mesh.listen(service.worker_id)
        await service.start()
        await bus.nc.flush()
        started.append(running)
        return running

    yield start_worker
    for running in started:
        if not running.service.bus.nc.is_closed:
            await running.service.stop()


async def test_streams_of_the_base_and_eight_adapters_say_what_transformers_and_peft_say(start, adapters, oracle):
    worker = await start()
    refs = [None, *[await worker.mesh.publish_adapter(adapter) for adapter in adapters]]
    prompts = random_prompts(18)
    requests = [generate(prompt, adapter=refs[i % 9]) for i, prompt in enumerate(prompts)]
    await worker.accepted(*requests)
    for i, request in enumerate(requests):
        end = await worker.mesh.ended(request.request_id)
        assert (end.finish, end.error) == ("length", None)
        fixture = adapters[i % 9 - 1] if i % 9 else None
        assert worker.mesh.tokens(request.request_id) == oracle.greedy(prompts[i], 8, fixture), fixture
    assert worker.service.not_ready() == []


async def test_each_gateway_gets_one_message_per_step_with_all_its_tokens(start):
    worker = await start()
    worker.slow_down(0.02)
    requests = [generate([5, 6, 7 + i], gateway_id=f"g{i % 2}", max_tokens=12) for i in range(8)]
    await worker.accepted(*requests)
    for request in requests:
        await worker.mesh.ended(request.request_id)
    for gateway_id in ("g0", "g1"):
        steps = [frame.step for frame in worker.mesh.frames[gateway_id]]
        assert len(steps) == len(set(steps)) and steps == sorted(steps)
        assert max(len(frame.items) for frame in worker.mesh.frames[gateway_id]) == 4
    every = [item.request_id for frame in worker.mesh.frames["g0"] for item in frame.items]
    assert set(every) == {request.request_id for request in requests[::2]}


async def test_a_cancel_ends_a_request_within_one_step(start):
    worker = await start()
    worker.slow_down(0.1)
    request, other = generate([1, 2, 3], max_tokens=200), generate([1, 2, 4], max_tokens=30)
    await worker.accepted(request, other)
    await eventually(lambda: len(worker.mesh.tokens(request.request_id)) >= 2)
    began = time.monotonic()
    await worker.control(Cancel(request_id=request.request_id, epoch=0))
    end = await worker.mesh.ended(request.request_id)
    assert end.finish == "cancelled" and time.monotonic() - began < 0.5
    assert (await worker.mesh.ended(other.request_id)).finish == "length"


async def test_an_older_cancel_does_not_reach_a_newer_epoch(start):
    worker = await start()
    worker.slow_down(0.02)
    request = generate([1, 2, 3], max_tokens=20, epoch=2)
    await worker.accepted(request)
    await worker.control(Cancel(request_id=request.request_id, epoch=1))
    await worker.control(Cancel(request_id="unknown", epoch=1))
    assert (await worker.mesh.ended(request.request_id, 2)).finish == "length"


async def test_a_resumed_request_goes_on_where_it_was_and_says_the_same(start, oracle):
    worker = await start()
    [prompt] = random_prompts(1)
    right = oracle.greedy(prompt, 10, None)
    request = generate(prompt, max_tokens=10, output=pack_tokens(right[:4]), epoch=1)
    await worker.accepted(request)
    await worker.mesh.ended(request.request_id, 1)
    assert worker.mesh.items(request.request_id, 1)[0].index == 4
    assert worker.mesh.tokens(request.request_id, 1) == right[4:]


async def test_an_assign_repeated_is_accepted_and_runs_once_and_a_newer_epoch_replaces_the_older(start):
    worker = await start()
    worker.slow_down(0.02)
    request = generate([1, 2, 3], max_tokens=40)
    await worker.accepted(request, request)
    await worker.accepted(request)
    await eventually(lambda: len(worker.mesh.tokens(request.request_id)) >= 3)
    so_far = worker.mesh.tokens(request.request_id)
    newer = msgspec.structs.replace(request, epoch=1, output=pack_tokens(so_far))
    await worker.accepted(newer)
    assert (await worker.mesh.ended(request.request_id, 0)).finish == "cancelled"
    assert (await worker.mesh.ended(request.request_id, 1)).finish == "length"
    assert len(so_far) + len(worker.mesh.tokens(request.request_id, 1)) == 40
    assert worker.mesh.tokens(request.request_id, 0)[: len(so_far)] == so_far


async def test_an_older_epoch_is_refused_while_a_newer_one_runs(start):
    worker = await start()
    worker.slow_down(0.02)
    request = generate([1, 2, 3], max_tokens=40, epoch=3)
    await worker.accepted(request)
    error = await worker.refusal(msgspec.structs.replace(request, epoch=2))
    assert error.status == 409 and "epoch 3" in error.message


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"base_model": "other"}, "model_not_found", "'tiny', not 'other'"),
        ({"prompt": pack_tokens([1] * 256)}, "context_length_exceeded", "256 tokens.*context of 256"),
        ({"prompt": pack_tokens([1] * 200), "output": pack_tokens([1] * 60)}, "context_length_exceeded", "200.*60.*256"),
        ({"prompt": b""}, "invalid_value", "no tokens"),
        ({"prompt": b"12345"}, "invalid_value", "four bytes"),
        ({"prompt": pack_tokens([1, 211])}, "invalid_value", r"\[0, 211\)"),
        ({"prompt": pack_tokens([-1])}, "invalid_value", r"\[0, 211\)"),
        ({"adapter": AdapterRef(name="big", digest="d", rank=256, size_bytes=9)}, "adapter_not_found", "not registered"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(start, changed, code, says):
    worker = await start()
    error = await worker.refusal(generate([1, 2, 3], **changed))
    assert error.code == code
    with pytest.raises(type(error), match=says):
        raise error


async def test_a_rank_over_the_limit_is_refused(start, adapters):
    worker = await start(max_lora_rank=16)
    ref = await worker.mesh.publish_adapter(adapters[3])
    error = await worker.refusal(generate([1], adapter=ref))
    assert error.status == 400 and "rank 64" in error.message and "1 to 16" in error.message


async def test_a_full_worker_refuses_with_a_time_to_come_back_and_takes_again_later(start):
    worker = await start(max_running=2, max_waiting=3)
    worker.slow_down(0.02)
    requests = [generate([1, 2, 3 + i], max_tokens=20) for i in range(5)]
    await worker.accepted(*requests)
    error = await worker.refusal(generate([9]))
    assert error.status == 429 and 0 < error.retry_after_s <= 10
    for request in requests:
        assert (await worker.mesh.ended(request.request_id)).finish == "length"
    last = generate([9])
    await worker.accepted(last)
    assert (await worker.mesh.ended(last.request_id)).finish == "length"


async def test_twenty_requests_for_a_new_adapter_fetch_it_once_and_block_nobody(start, adapters):
    worker = await start(max_running=32, max_waiting=32)
    ref = await worker.mesh.publish_adapter(adapters[2])
    gate = worker.gate_fetches()
    waiting = [generate([1, 2, 3 + i], adapter=ref) for i in range(20)]
    await worker.accepted(*waiting)
    base = generate([1, 2, 3])
    await worker.accepted(base)
    assert (await worker.mesh.ended(base.request_id)).finish == "length"
    await eventually(lambda: [b.phase for b in latest(worker).requests].count("loading") == 20)
    assert worker.mesh.items(waiting[0].request_id) == []
    gate.set()
    for request in waiting:
        assert (await worker.mesh.ended(request.request_id)).finish == "length"
    assert worker.fetches == [ref.digest]


def latest(worker: Running) -> WorkerSnapshot:
    """The worker as somebody sees it who applies every message in order."""
    known: WorkerSnapshot | None = None
    for state in worker.mesh.states:
        if isinstance(state, WorkerSnapshot):
            known = state
        elif known is not None:
            known = apply(known, state)
    assert known is not None
    return known


async def test_a_cancel_or_a_newer_epoch_reaches_a_request_that_is_still_loading(start, adapters):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[0])
    gate = worker.gate_fetches()
    first, second = generate([1], adapter=ref), generate([2], adapter=ref)
    await worker.accepted(first, second)
    await worker.control(Cancel(request_id=first.request_id, epoch=0))
    assert (await worker.mesh.ended(first.request_id)).finish == "cancelled"
    await worker.accepted(msgspec.structs.replace(second, epoch=1))
    assert (await worker.mesh.ended(second.request_id, 0)).finish == "cancelled"
    gate.set()
    assert (await worker.mesh.ended(second.request_id, 1)).finish == "length"
    await eventually(lambda: worker.service.adapters.tiers.holders(ref.digest) == 0)


async def test_an_adapter_that_cannot_be_fetched_fails_its_own_requests_and_is_tried_again(start, adapters):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[0])
    store = await worker.mesh.bus.object_store(subjects.BLOBS)
    await store.delete(ref.digest)
    broken, healthy = generate([1], adapter=ref), generate([1])
    await worker.accepted(broken, healthy)
    end = await worker.mesh.ended(broken.request_id)
    assert end.finish == "error" and end.error.code == "adapter_not_found" and adapters[0].name in end.error.message
    assert (await worker.mesh.ended(healthy.request_id)).finish == "length"
    await worker.mesh.publish_adapter(adapters[0])
    again = generate([1], adapter=ref)
    await worker.accepted(again)
    assert (await worker.mesh.ended(again.request_id)).finish == "length"


async def test_a_corrupted_cache_is_healed_while_serving(start, adapters, oracle, tmp_path):
    first = await start()
    ref = await first.mesh.publish_adapter(adapters[1])
    path = tmp_path / "adapters" / f"{ref.digest}.safetensors"
    path.write_bytes(adapters[1].blob[:-4] + b"\1\2\3\4")
    worker = await start()
    await eventually(lambda: any(held.tier == "disk" for held in latest(worker).adapters))
    [prompt] = random_prompts(1)
    request = generate(prompt, adapter=ref)
    await worker.accepted(request)
    await worker.mesh.ended(request.request_id)
    assert worker.mesh.tokens(request.request_id) == oracle.greedy(prompt, 8, adapters[1])
    assert path.read_bytes() == adapters[1].blob


async def test_a_deleted_adapter_leaves_every_tier_once_its_running_request_is_done(start, adapters, tmp_path):
    worker = await start()
    worker.slow_down(0.03)
    ref = await worker.mesh.publish_adapter(adapters[1])
    request = generate([1, 2, 3], adapter=ref, max_tokens=40)
    await worker.accepted(request)
    await eventually(lambda: [held.tier for held in latest(worker).adapters] == ["device"])
    await worker.mesh.delete_adapter(ref)
    await eventually(lambda: worker.service.adapters.watch.by_digest(ref.digest) is None)
    assert (await worker.refusal(generate([1], adapter=ref))).code == "adapter_not_found"
    assert [held.digest for held in latest(worker).adapters] == [ref.digest]
    assert (await worker.mesh.ended(request.request_id)).finish == "length"
    assert len(worker.mesh.tokens(request.request_id)) == 40
    await eventually(lambda: latest(worker).adapters == [])
    assert list((tmp_path / "adapters").iterdir()) == []
    assert worker.engine.residency() == []


async def test_an_adapter_is_prefetched_and_unloaded_on_request(start, adapters):
    worker = await start()
    ref = await worker.mesh.publish_adapter(adapters[1])
    await worker.control(LoadAdapter(adapter=ref))
    await eventually(lambda: [held.tier for held in latest(worker).adapters] == ["device"])
    await worker.control(UnloadAdapter(digest=ref.digest))
    await eventually(lambda: latest(worker).adapters == [])
    request = generate([1], adapter=ref)
    await worker.accepted(request)
    assert (await worker.mesh.ended(request.request_id)).finish == "length"


async def test_a_lost_gateways_requests_are_cancelled_and_the_others_go_on(start, connect):
    worker = await start()
    worker.slow_down(0.03)
    leases = {name: LeaseHolder(await connect(f"gateway-{name}"), "gateway", name, "first") for name in ("g1", "g2")}
    for lease in leases.values():
        await lease.start()
    lost, kept = generate([1], max_tokens=200, gateway_id="g1"), generate([1], max_tokens=30, gateway_id="g2")
    await worker.accepted(lost, kept)
    await eventually(lambda: worker.mesh.tokens(lost.request_id))
    await leases["g1"].release()
    assert (await worker.mesh.ended(lost.request_id)).finish == "cancelled"
    assert (await worker.mesh.ended(kept.request_id)).finish == "length"


async def test_draining_finishes_what_runs_refuses_what_comes_and_gives_the_lease_back(start, connect):
    worker = await start()
    worker.slow_down(0.02)
    lost: list[str] = []
    watch = LeaseWatch(await connect("scheduler"), "worker", lost.append)
    await watch.start()
    request = generate([1], max_tokens=20)
    await worker.accepted(request)
    draining = asyncio.ensure_future(worker.service.drain())
    await eventually(lambda: latest(worker).draining)
    assert (await worker.refusal(generate([1]))).code == "unavailable"
    assert worker.service.not_ready() == ["draining"]
    await draining
    assert (await worker.mesh.ended(request.request_id)).finish == "length"
    assert lost == []
    await worker.service.stop()
    await eventually(lambda: lost == [worker.service.worker_id])


async def test_what_is_left_at_the_drains_deadline_is_handed_back_as_worker_lost(start, adapters):
    worker = await start(max_running=1)
    worker.slow_down(0.05)
    ref = await worker.mesh.publish_adapter(adapters[0])
    worker.gate_fetches()
    requests = [generate([1, i], max_tokens=200) for i in range(3)] + [generate([1], adapter=ref)]
    await worker.accepted(*requests)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.service.drain(), 0.3)
    await worker.service.stop()
    for request in requests:
        end = await worker.mesh.ended(request.request_id)
        assert end.finish == "error" and end.error.code == "worker_lost"
    tokens = worker.mesh.tokens(requests[0].request_id)
    assert worker.mesh.end(requests[0].request_id).index == len(tokens) > 0


async def test_a_drain_command_makes_the_process_leave(start):
    worker = await start()
    await worker.control(Drain())
    await eventually(lambda: worker.left)


async def test_a_failing_forward_pass_ends_its_requests_and_later_ones_are_served(start):
    worker = await start()
    forward = worker.engine._runner.forward

    def fail_once(batch: Any) -> Any:
        worker.engine._runner.forward = forward
        raise RuntimeError("device error")

    worker.engine._runner.forward = fail_once
    request = generate([1, 2])
    await worker.accepted(request)
    end = await worker.mesh.ended(request.request_id)
    assert end.finish == "error" and "device error" in end.error.message
    healthy = generate([1, 2])
    await worker.accepted(healthy)
    assert (await worker.mesh.ended(healthy.request_id)).finish == "length"
    assert worker.service.not_ready() == []


async def test_an_engine_that_keeps_failing_gives_its_requests_back_and_leaves(start):
    worker = await start()

    def fail(batch: Any) -> Any:
        raise RuntimeError("device lost")

    worker.engine._runner.forward = fail
    for i in range(3):
        request = generate([1, i])
        await worker.accepted(request)
        await worker.mesh.ended(request.request_id)
    await eventually(lambda: worker.left)
    assert any("3 steps in a row" in reason for reason in worker.service.not_ready())
    assert (await worker.refusal(generate([1]))).code == "unavailable"
    await eventually(lambda: latest(worker).draining)


async def test_states_arrive_without_gaps_and_end_empty(start, adapters):
    worker = await start()
    refs = [None, *[await worker.mesh.publish_adapter(adapter) for adapter in adapters[:3]]]
    requests = [generate([1, i], adapter=refs[i % 4], max_tokens=3 + i) for i in range(12)]
    await worker.accepted(*requests)
    for request in requests:
        await worker.mesh.ended(request.request_id)
    await eventually(lambda: latest(worker).requests == [])
    snapshots = [i for i, state in enumerate(worker.mesh.states) if isinstance(state, WorkerSnapshot)]
    await eventually(lambda: isinstance(worker.mesh.states[-1], WorkerSnapshot) and len(worker.mesh.states) > snapshots[-1] + 1)
    states = worker.mesh.states
    assert [state.seq for state in states] == list(range(states[0].seq, states[0].seq + len(states)))
    known = states[0]
    for state in states[1:-1]:
        known = state if isinstance(state, WorkerSnapshot) else apply(known, state)
    final = as_sets(states[-1])
    assert as_sets(known)[:3] == final[:3]
    assert states[-1].kv_blocks_free <= 400 and states[-1].perf.decode_base_ms >= 0
    assert {held.digest for held in states[-1].adapters if held.tier == "device"} == {ref.digest for ref in refs[1:]}


async def test_losing_nats_stops_neither_the_engine_nor_the_worker(start, nats_server):
    worker = await start()
    worker.slow_down(0.03)
    request = generate([1, 2, 3], max_tokens=60)
    await worker.accepted(request)
    await eventually(lambda: worker.mesh.tokens(request.request_id))
    nats_server.kill()
    await eventually(lambda: not worker.service.bus.connected and not worker.mesh.bus.connected)
    assert worker.service.not_ready() == ["NATS is not connected"]
    await nats_server.start()
    await eventually(lambda: worker.service.bus.connected and worker.mesh.bus.connected, within_s=15)
    await eventually(lambda: not worker.service._live)
    after = generate([1])
    await worker.accepted(after)
    assert (await worker.mesh.ended(after.request_id)).finish == "length"
    assert worker.service.not_ready() == []


async def test_requests_whose_frames_could_not_be_sent_are_cancelled_and_their_gateway_hears_so(
    start, nats_server, monkeypatch
):
    worker = await start()
    worker.slow_down(0.03)
    request = generate([1, 2, 3], max_tokens=200)
    await worker.accepted(request)
    await eventually(lambda: worker.mesh.tokens(request.request_id))
    worker.service.bus.nc._max_pending_size = 1
    nats_server.kill()
    await eventually(lambda: not worker.service._live)
    await nats_server.start()
    await eventually(lambda: worker.service.bus.connected and worker.mesh.bus.connected, within_s=15)
    after = generate([1])
    await worker.accepted(after)
    await worker.mesh.ended(after.request_id)
    ends = [item for item in worker.mesh.items(request.request_id) if item.finish]
    assert [end.error.code for end in ends] == ["worker_lost"]
