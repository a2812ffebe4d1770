"""Schedulers and fake workers on the test's server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from motet.services.scheduler.config import SchedulerConfig
from motet.services.scheduler.service import SchedulerService
from motet.shared.bus import Bus
from tests.support_worker import FakeWorker

Schedule = Callable[..., Awaitable[SchedulerService]]


@pytest.fixture
async def schedule(bus: Bus, nats_url: str) -> AsyncIterator[Schedule]:
    """Starts schedulers on the test's server."""
    started: list[SchedulerService] = []

    async def start(**config) -> SchedulerService:
        service = SchedulerService(SchedulerConfig.of(nats_url=nats_url, **config))
        started.append(service)
        await service.start()
        return service

    yield start
    for service in started:
        await service.stop()


@pytest.fixture
async def hire(bus: Bus, connect) -> Callable[..., Awaitable[FakeWorker]]:
    """Starts fake workers, each on a connection of its own."""

    async def start(worker_id: str, *, lease: bool = True, prepare=lambda worker: None, **options) -> FakeWorker:
        worker = FakeWorker(await connect(f"worker-{worker_id}"), worker_id, **options)
        prepare(worker)
        await worker.start(lease=lease)
        return worker

    return start
