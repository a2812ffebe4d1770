"""Promise: after the death of any process the stack recovers, and running streams continue with the same tokens."""

from __future__ import annotations

import asyncio
import re
import resource
from typing import Any

import pytest

from motet.cli.adapters import upload
from motet.cli.client import ApiError, Client
from tests.e2e.asking import answered, long_request
from tests.e2e.live import DEMO, LiveStack
from tests.support import eventually

SEEDS = range(6)


async def test_streams_continue_when_their_worker_is_killed(stack: LiveStack, client: Client) -> None:
    calm = await asyncio.gather(*(generate(client, seed) for seed in SEEDS))
    assert all(result["tokens"] == 300 for result in calm)
    resumed_before = await resumed(client)
    under_way = [0] * len(SEEDS)

    async def kill_one() -> tuple[str, int]:
        """Kill the worker with most of the streams. The scheduler may have sent all to one."""
        await eventually(lambda: min(under_way) >= 20, within_s=60)
        workers = (await client.call("GET", "/v1/status"))["workers"]
        busiest = max(workers, key=lambda worker: worker["running"])["worker_id"]
        return busiest, stack.kill(busiest)

    *shaken, (killed, dead) = await asyncio.gather(*(generate(client, seed, under_way) for seed in SEEDS), kill_one())
    assert shaken == calm
    assert await resumed(client) > resumed_before, "no stream was on the worker that was killed"
    await healed(stack, client, killed, dead)


@pytest.mark.parametrize("service", ["predictor", "scheduler-1", "registry", "gateway-1", "worker-2", "nats"])
async def test_any_process_may_die(stack: LiveStack, client: Client, service: str) -> None:
    await healed(stack, client, service, stack.kill(service))
    assert await answered(client, "upper-case", "hello there") == "HELLO THERE"


async def test_an_embedded_broker_that_cannot_write_any_more_is_replaced(stack: LiveStack, client: Client) -> None:
    """As after a full disk, whose error it would keep until its end. Leases fail to be renewed at once."""
    pid = stack.pid("nats")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    await healed(stack, client, "nats", pid)
    assert "nothing is stored since the disk of" in stack.output.read_text()
    assert await answered(client, "upper-case", "hello there") == "HELLO THERE"


async def test_an_adapter_added_at_run_time_survives_the_registry_and_the_broker(stack: LiveStack, client: Client) -> None:
    card = await upload(client, "added", DEMO / "adapters" / "upper-case")
    for service in ("registry", "nats"):
        await healed(stack, client, service, stack.kill(service))
        assert await answered(client, "added", "hello there") == "HELLO THERE"
    assert (await client.call("GET", "/v1/adapters/added"))["digest"] == card["digest"]
    await client.call("DELETE", "/v1/adapters/added")
    with pytest.raises(ApiError) as refusal:
        await client.call("GET", "/v1/adapters/added")
    assert refusal.value.status == 404


async def generate(client: Client, seed: int, progress: list[int] | None = None) -> dict[str, Any]:
    """A long seeded completion: its text, and the number of billed tokens."""
    pieces, tokens = [], 0
    async for event in client.events("/v1/completions", long_request(seed)):
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        pieces += [choice["text"] for choice in event["choices"]]
        if progress is not None:
            progress[seed] = len(pieces)
    return {"text": "".join(pieces), "tokens": tokens}


async def resumed(client: Client) -> float:
    """How many streams the gateway has resumed on another worker so far."""
    text = await client.call("GET", "/metrics")
    return sum(float(value) for value in re.findall(r"^motet_requests_resumed_total\{[^}]*\} (\S+)$", text, re.M))


async def healed(stack: LiveStack, client: Client, service: str, dead: int) -> None:
    """Wait until `service` runs again under another process id than `dead` and everything is ready."""

    async def whole() -> bool:
        facts = stack.facts()
        if facts.services[service]["pid"] == dead:
            return False
        try:
            status = await client.call("GET", "/v1/status")
        except ApiError:
            return False
        workers = [worker for worker in status["workers"] if not worker["stale"] and not worker["draining"]]
        return not status["gateway"]["not_ready"] and len(workers) == 2

    await eventually(whole, within_s=60, every_s=0.1)
