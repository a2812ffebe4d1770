"""A gateway over real HTTP, with two scripted workers behind it."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from motet.services.gateway.service import GatewayService
from motet.shared.bus import Bus
from tests.services.gateway.support import Connect, FakeScheduler, put_adapter, running_gateway, start_workers
from tests.support import eventually
from tests.support_worker import FakeWorker

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import openai


class Mesh:
    """One running gateway, and the fake services around it."""

    def __init__(self, gateway: GatewayService, scheduler: FakeScheduler, workers: list[FakeWorker], bus: Bus) -> None:
        self.gateway, self.scheduler, self.workers, self.bus = gateway, scheduler, workers, bus
        self.url = f"http://127.0.0.1:{gateway.port}"

    @property
    def first(self) -> FakeWorker:
        return self.workers[0]

    @property
    def second(self) -> FakeWorker:
        return self.workers[1]

    def say(self, *texts: str) -> None:
        """Let every worker answer with these texts, request by request (the last one again and again)."""
        answers = [self.gateway.prompts.tokenizer.encode(text).ids for text in texts]
        for worker in self.workers:
            worker.speak = lambda _: answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
async def mesh(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    workers = await start_workers(connect, "w1", "w2")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1", "w2"])
    await scheduler.start()
    await put_adapter(bus, "upper")
    async with running_gateway(nats_url, tmp_path) as gateway:
        await eventually(lambda: not gateway.not_ready() and gateway.adapters.resolve("upper"))
        yield Mesh(gateway, scheduler, workers, bus)


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    """An unmodified openai-python client without retries."""
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
