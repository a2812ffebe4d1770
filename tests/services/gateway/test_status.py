"""Promise: `/v1/status` and `motet status` name the adapter that each worker has merged into its weights."""

from __future__ import annotations

import asyncio

import aiohttp
from click.testing import CliRunner

from motet.cli.status import status
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.messages import ClusterStatus, StatusRequest, WorkerStatus
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect


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
