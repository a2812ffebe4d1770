"""Fixtures of tests of a whole worker: one tiny checkpoint with adapters, its oracle, and workers on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motet.services.worker.config import WorkerConfig
from motet.services.worker.service import WorkerService
from tests.services.worker.support_service import BASE, Mesh, Running, Start
from tests.support_models import AdapterFixture, Oracle, make_adapters, make_checkpoint
from tests.support_triton import replace_once_per_launch

replace_once_per_launch()  # interpreted kernels are quicker


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint("llama2", tmp_path_factory.mktemp("worker-model"))


@pytest.fixture(scope="session")
def adapters(checkpoint, tmp_path_factory) -> list[AdapterFixture]:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("worker-adapters"))


@pytest.fixture(scope="session")
def oracle(checkpoint, adapters) -> Oracle:
    return Oracle(checkpoint, adapters)


@pytest.fixture
async def start(bus, nats_url, checkpoint, tmp_path) -> AsyncIterator[Start]:
    """Starts workers; stops those that are still there afterwards."""
    started: list[Running] = []

    async def start_worker(*, link_bytes_per_s: float = 0.0, **changed: Any) -> Running:
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

        service = WorkerService(WorkerConfig.of(**options | changed), leave, link_bytes_per_s=link_bytes_per_s)
        running = Running(service, mesh)
        await mesh.listen(service.worker_id)
        await service.start()
        started.append(running)
        return running

    yield start_worker
    for running in started:
        if not running.service.bus.nc.is_closed:
            await running.service.stop()
