"""One running stack for all end-to-end tests: two workers, all demo adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from motet.cli.client import Client
from tests.e2e.live import LiveStack, alive


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """The stack. After the last test it must drain cleanly, and no service may have violated a bus permission."""
    live = LiveStack(tmp_path_factory.mktemp("stack"), workers=2)
    live.launch()
    try:
        live.wait_ready()
        yield live
        pids = live.pids()
        assert live.stop() == 0, live.output.read_text()[-4000:]
        assert not [pid for pid in pids if alive(pid)]
        refused = [line for line in live.log("nats").splitlines() if "ermissions Violation" in line]
        assert not refused, refused[:10]
    finally:
        live.stop()


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[Client]:
    async with Client(stack.facts().urls[0], timeout_s=60.0) as client:
        yield client
