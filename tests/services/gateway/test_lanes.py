"""Promise: long work neither stalls the event loop nor lets one tenant's requests wait for all of another's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.services.gateway.openai.lanes import INLINE_BYTES, Lane
from motet.services.gateway.openai.prompt import Prompts
from motet.shared.clock import now_s
from motet.shared.errors import Overloaded
from tests.services.gateway.support_tokenizers import write_model_dir

LONG = INLINE_BYTES + 1


class Gate:
    """Work that waits until it is let through. `begun`: the names of the work, in the order in which it began."""

    def __init__(self) -> None:
        self.open, self.begun = threading.Event(), list[str]()

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.open.wait(20)
        return name


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def enter(lane: Lane, gate: Gate, name: str, tenant: str = "") -> asyncio.Task[str]:
    return asyncio.get_running_loop().create_task(lane.run(lambda: gate.work(name), LONG, tenant))


async def test_short_work_is_done_at_once_and_long_work_in_a_thread() -> None:
    lane = Lane("test", 1)
    assert await lane.run(threading.get_ident, INLINE_BYTES) == threading.get_ident()
    assert await lane.run(threading.get_ident, LONG) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 // 0, LONG)
    lane.close()


async def test_tenants_take_turns_and_work_without_a_caller_is_left_out(gate: Gate) -> None:
    lane = Lane("test", 1)
    greedy = [enter(lane, gate, f"greedy {i}", "greedy") for i in range(4)]
    await asyncio.sleep(0)
    modest = enter(lane, gate, "modest", "modest")
    await asyncio.sleep(0)
    greedy[2].cancel()
    gate.open.set()
    await asyncio.gather(*greedy, modest, return_exceptions=True)
    assert gate.begun == ["greedy 0", "greedy 1", "modest", "greedy 3"]
    lane.close()


async def test_a_full_queue_refuses_a_tenant_above_its_share_and_takes_another(gate: Gate) -> None:
    lane = Lane("test", 1, waiting=8)
    held = [enter(lane, gate, "greedy", "greedy") for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await enter(lane, gate, "one too many", "greedy")
    held.append(enter(lane, gate, "modest", "modest"))
    await asyncio.sleep(0)
    gate.open.set()
    assert len(await asyncio.gather(*held)) == 5
    assert await enter(lane, gate, "again", "greedy") == "again", "places are given back"
    lane.close()


async def test_a_queue_is_bounded_in_bytes_unless_its_work_waits_elsewhere_otherwise(gate: Gate) -> None:
    bounded, unbounded = Lane("test", 1, size=3 * LONG), Lane("test", 1, size=3 * LONG, bounded=False)
    held = [enter(lane, gate, "x") for lane in (bounded, unbounded) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await enter(bounded, gate, "x")
    held.append(enter(unbounded, gate, "x"))
    gate.open.set()
    assert len(await asyncio.gather(*held)) == 5
    bounded.close()
    unbounded.close()


async def test_tokenizing_a_long_prompt_leaves_the_loop_free(tmp_path: Path) -> None:
    prompts, lane, longest_s = Prompts(write_model_dir(tmp_path)), Lane("test", 1), 0.0
    text = "größere Äpfel hello world " * 20_000
    working = asyncio.ensure_future(lane.run(lambda: prompts.text(prompts.texts([text])[0]), len(text)))
    began_s = last_s = now_s()
    while not working.done():
        await asyncio.sleep(0)
        longest_s, last_s = max(longest_s, now_s() - last_s), now_s()
    assert "hello world" in await working
    assert longest_s < max((last_s - began_s) / 2, 0.05), "neither encoding nor decoding keeps the interpreter's lock"
    lane.close()
