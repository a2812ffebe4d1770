"""Promise: a model that vLLM divides among two processes answers as in one, and the death of one of them loses nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from motet.cli.client import Client
from motet.examples.demo import BASE, DEMO
from motet.examples.demo.tasks import TASKS
from tests.e2e.live import LiveStack
from tests.engines.support_mesh import core_of, go_on_through, said, serving, vllm_stack, workers
from tests.support import eventually

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm"),
    pytest.mark.timeout(1200),
]
PATIENCE_S = 500.0  # a start: two processes wait for each other without a pause, and take the cores from all others
MODELS = [BASE, *(task.adapter for task in TASKS[:5])]  # more adapters than slots


def patient(stack: LiveStack) -> Client:
    """A client without objectives: on busy cores these models take longer than the usual ones allow."""
    client = Client(stack.facts().urls[0], timeout_s=600.0)
    client.headers |= {"x-slo-ttft-ms": "600000", "x-slo-tpot-ms": "60000"}
    return client


async def answers(stack: LiveStack) -> dict[str, str]:
    """What each model says, all asked at once."""
    async with patient(stack) as client:
        found = await asyncio.gather(*(said(client, model, ignore_eos=True, max_tokens=40) for model in MODELS))
    return dict(zip(MODELS, found, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The answers of vLLM in one process."""
    with vllm_stack(tmp_path_factory.mktemp("one-rank"), DEMO / "model", "") as live:
        return asyncio.run(answers(live))


@pytest.fixture(scope="module")
def stack(alone: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """The same in two processes, after the first has ended."""
    parallel = "--tensor-parallel-size 2"
    with vllm_stack(tmp_path_factory.mktemp("two-ranks"), DEMO / "model", parallel, start_s=PATIENCE_S) as live:
        yield live


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[Client]:
    async with patient(stack) as client:
        yield client


def ranks_of(core: int) -> list[int]:
    """Process ids of vLLM's ranks below a core."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"\nPPid:\t{core}\n" in status.read_text() and b"Worker" in (status.parent / "cmdline").read_bytes():
                found.append(int(status.parent.name))
        except OSError:
            continue
    return sorted(found)


def lives(pid: int) -> bool:
    """Whether the process runs; one that has ended may wait for its parent to notice."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_mixed_adapters_get_the_tokens_of_one_process(stack: LiveStack, alone: dict[str, str]) -> None:
    [core] = core_of(stack.pid("worker-1"))
    assert len(ranks_of(core)) == 2
    assert await answers(stack) == alone
    assert len(set(alone.values())) == len(MODELS)


async def test_no_stream_is_lost_when_one_rank_is_killed(stack: LiveStack, client: Client) -> None:
    """Each goes on as it would have; each token comes once (`go_on_through` counts them, and the billed ones)."""
    [core] = core_of(stack.pid("worker-1"))
    first, last = ranks_of(core)

    async def kill() -> None:
        os.kill(last, signal.SIGKILL)
        await eventually(lambda: not lives(core) and not lives(first), within_s=60)

    await go_on_through(client, kill, tokens=120)
    await eventually(lambda: serving(client, "worker-1"), within_s=PATIENCE_S, every_s=0.5)
    [worker] = await workers(client)
    assert not worker["running"] and not worker["waiting"]
    [another] = core_of(stack.pid("worker-1"))
    assert another != core and len(ranks_of(another)) == 2
