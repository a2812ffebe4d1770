"""Fixtures for all tests: a real nats-server per test, and bus connections to it."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

# Read when a test first imports torch. The suite's processes share the cores, and their matrices are small: further threads of
# each would spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # read when a test first imports triton
    os.environ["TRITON_INTERPRET"] = "1"

from motet.cli.nats_server import NatsServer
from motet.shared.bus import Bus
from motet.shared.config import BusConfig
from motet.shared.malloc import uncollected
from motet.shared.provision import provision

COLLECT_ALL_EVERY = 1000  # tests


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: two processes per core, because many tests wait for services in other processes."""
    return 2 * (os.cpu_count() or 1)


hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one stands still now and then
hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Restore the log levels after each test, because some commands, called in this process, change them."""
    loggers = [logging.getLogger(), logging.getLogger("motet")]
    levels = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Restore the number of torch's threads after each test, because a worker in this process sets its own."""
    yield
    torch, threads = sys.modules.get("torch"), int(os.environ["OMP_NUM_THREADS"])
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make many objects that stay: nothing looks for garbage among them."""
    with uncollected():
        result = yield
        gc.freeze()
    return result


_begun = itertools.count(1)


@pytest.fixture(autouse=True)
def old_objects_are_not_collected() -> None:
    """Before each test a collection looks at what is younger than the test before. One that looks at all imported modules takes
    half a second. It is rare: it finds what outlived its test and became garbage later, as a module's fixtures do."""
    if next(_begun) % COLLECT_ALL_EVERY == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A real nats-server with JetStream on a free port. It ends with the test, at once: nobody reads what it has stored."""
    server = NatsServer(tmp_path / "nats")
    await server.start()
    yield server
    server.kill()


@pytest.fixture
async def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture
async def connect(nats_url: str) -> AsyncIterator[Callable[[str], Awaitable[Bus]]]:
    """Opens named buses on the test's server and closes them afterwards."""
    opened: list[Bus] = []

    async def open_bus(name: str = "test") -> Bus:
        bus = await Bus.connect(BusConfig(nats_url=nats_url), name)
        opened.append(bus)
        return bus

    yield open_bus
    for bus in opened:
        await bus.close()


@pytest.fixture
def tenants(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Those with streams of their own beside `default`: what a module calls TENANTS. Each costs every test three streams."""
    return getattr(request.module, "TENANTS", ())


@pytest.fixture
async def bus(connect: Callable[[str], Awaitable[Bus]], tenants: tuple[str, ...]) -> Bus:
    """One bus with all streams and buckets provisioned."""
    opened = await connect("test")
    await provision(opened, tenants=tenants, tenant_bytes=64 << 20)
    return opened
