"""Promise: `/v1/status` and `motet status` name the adapter that each worker has merged into its weights, and the adapters that
were refused."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
from click.testing import CliRunner

from motet.cli.adapters import list_
from motet.cli.status import status
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.model import Mechanism
from motet.shared.refused_adapters import refused
from motet.shared.wire.admin import ClusterStatus, StatusRequest, WorkerStatus
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect
from tests.support import eventually


def worker(worker_id: str, merged: str, share: float) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker_id, incarnation="1", base_model="demo", engine="native", device="cpu", running=8, waiting=0,
        in_flight=0, max_running=32, max_waiting=64, kv_blocks_free=10, kv_blocks_total=20, adapter_bytes_free=1,
        adapter_bytes_total=2, adapters_on_device=2, adapters_on_host=2, draining=False, stale=False, age_ms=1, merged=merged,
        merged_share=share,
    )  # fmt: skip


async def tell(bus: Bus, *workers: WorkerStatus) -> None:
    """A scheduler that sees these workers."""

    async def answer(_: StatusRequest) -> ClusterStatus:
        return ClusterStatus(scheduler_id="brain", workers=list(workers))

    await bus.serve("status", subjects.SCHEDULER_STATUS, StatusRequest, answer, queue="scheduler")


async def test_the_merged_adapter_has_its_name_if_it_has_one(mesh: Mesh, connect: Connect, http: aiohttp.ClientSession) -> None:
    await tell(
        await connect("brain"), worker("w1", "digest-of-upper", 0.75), worker("w2", "gone-adapter", 1.0), worker("w3", "", 0.0)
    )
    async with http.get(f"{mesh.url}/v1/status") as answer:
        workers = (await answer.json())["workers"]
    assert [(one["merged"], one["merged_name"]) for one in workers] == [
        ("digest-of-upper", "upper"),
        ("gone-adapter", ""),
        ("", ""),
    ]


async def test_the_command_prints_a_line_for_each_merged_adapter(mesh: Mesh, connect: Connect) -> None:
    await tell(
        await connect("brain"),
        worker("w1", "digest-of-upper", 0.75),
        worker("w2", "0123456789abcdef", 1.0),
        worker("w3", "", 0.0),
    )
    shown = await asyncio.to_thread(CliRunner().invoke, status, ["--url", mesh.url])
    assert shown.exit_code == 0, shown.output
    assert [line for line in shown.output.splitlines() if "merged" in line] == [
        "w1 has upper merged into its weights: 75% of its requests",
        "w2 has 0123456789ab merged into its weights: 100% of its requests",
    ]


async def test_a_worker_without_compiled_kernels_says_what_to_install(mesh: Mesh, connect: Connect) -> None:
    slow = msgspec.structs.replace(worker("w1", "", 0.0), kernels="reference", kernels_note="install g++")
    await tell(await connect("brain"), slow, msgspec.structs.replace(worker("w2", "", 0.0), kernels="avx2"))
    shown = await asyncio.to_thread(CliRunner().invoke, status, ["--url", f"{mesh.url}/v1"])
    assert "native kernels:avx2" in shown.output
    assert "w1 runs on kernels:reference: install g++" in shown.output.splitlines()
    assert "w2 runs" not in shown.output


async def test_refused_adapters_are_named_with_their_reasons_wherever_somebody_looks(
    mesh: Mesh, connect: Connect, http: aiohttp.ClientSession
) -> None:
    await tell(await connect("brain"), worker("w1", "", 0.0))
    kv = await mesh.bus.key_value(subjects.KV_ADAPTERS)
    record = refused([("cut", "not a safetensors file"), ("dora", "use_dora is not supported")])
    await kv.put("refused", msgspec.json.encode(record))
    await eventually(lambda: mesh.gateway.adapters.refused.total == 2)
    expected = {
        "total": 2,
        "adapters": [
            {"name": "cut", "reason": "not a safetensors file"},
            {"name": "dora", "reason": "use_dora is not supported"},
        ],
    }
    async with http.get(f"{mesh.url}/v1/adapters") as answer:
        assert (await answer.json())["refused"] == expected
    async with http.get(f"{mesh.url}/v1/status") as answer:
        assert (await answer.json())["refused_adapters"] == expected
    for name in ("cut", "demo:cut"):
        async with http.post(f"{mesh.url}/v1/completions", json={"model": name, "prompt": "x"}) as answer:
            assert answer.status == 404
            assert "refused: not a safetensors file" in (await answer.json())["error"]["message"]
    async with http.get(f"{mesh.url}/v1/adapters/dora") as answer:
        assert "refused: use_dora is not supported" in (await answer.json())["error"]["message"]
    for command in (status, list_):
        shown = await asyncio.to_thread(CliRunner().invoke, command, ["--url", mesh.url])
        assert "2 adapters of --adapters-dir refused:\n  cut: not a safetensors file\n  dora: use_dora" in shown.output
    assert "demo with 1 adapter;" in (await asyncio.to_thread(CliRunner().invoke, status, ["--url", mesh.url])).output


async def test_an_unknown_name_is_answered_with_the_one_that_it_resembles(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{mesh.url}/v1/completions", json={"model": "uper", "prompt": "x"}) as answer:
        message = (await answer.json())["error"]["message"]
    assert message.startswith("The model `uper` does not exist. Did you mean `upper`?")


async def test_a_line_for_each_worker_says_which_mechanisms_are_on_and_why(
    mesh: Mesh, connect: Connect, http: aiohttp.ClientSession
) -> None:
    told = {"queues": Mechanism("on", "2 of 9 waiting requests are late"), "merge": Mechanism("off", "the weights are int8")}
    await tell(await connect("brain"), msgspec.structs.replace(worker("w1", "", 0.0), mechanisms=told), worker("w2", "", 0.0))
    async with http.get(f"{mesh.url}/v1/status") as answer:
        workers = (await answer.json())["workers"]
    assert workers[0]["mechanisms"]["merge"] == {"state": "off", "why": "the weights are int8"} and not workers[1]["mechanisms"]
    shown = await asyncio.to_thread(CliRunner().invoke, status, ["--url", mesh.url])
    lines = shown.output.splitlines()
    assert "w1: merge off (the weights are int8); queues on (2 of 9 waiting requests are late)" in lines
    assert not any(line.startswith("w2:") for line in lines)
