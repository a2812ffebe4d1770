"""Promise: every malformed adapter is refused with its reason, leaves nothing behind and affects nothing else."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from nats.js import errors as js_errors

from motet.shared import subjects
from motet.shared.errors import MotetError
from tests.services.registry.conftest import Client, StartRegistry
from tests.support_adapters import write_adapter
from tests.support_malformed import Malformed, malformed, malformed_directories

AT_ONCE = 4
UPLOADED = 8  # of so many malformed files one comes in an archive; `make fuzz` uploads all
LIMIT_BYTES = 8 << 20


def verdict(name: str, reason: str, error: MotetError | None) -> str:
    """What is wrong with the treatment of `name`; "" for nothing."""
    if error is None:
        return f"{name}: accepted"
    if error.status not in (400, 413) or reason not in error.message:
        return f"{name}: {error.status} {error.message!r}, expected 400 or 413 with {reason!r}"
    if not error.param or len(error.param) > 200 or len(error.message) > 1000 or not error.message.isprintable():
        return f"{name}: {len(error.message)} characters, {error.param!r}, {error.message[:200]!r}"
    return ""


async def test_every_malformed_archive_and_file_is_refused_with_its_reason_and_leaves_nothing(
    start_registry: StartRegistry, connect, roots: Path
):
    registry = await start_registry(max_adapter_bytes=LIMIT_BYTES)
    client = Client(await connect("gateway"), roots)
    uploads = await client.bus.object_store(subjects.UPLOADS)
    cases = list(malformed(max_adapter_bytes=LIMIT_BYTES))
    assert len(cases) >= 60 and len({case.name for case in cases}) == len(cases)
    turn = asyncio.Semaphore(AT_ONCE)

    async def offer(case: Malformed, number: int) -> str:
        """Where the registry finds it. An archive costs a process, which sound archives of malformed files need not have."""
        if case.files is None or number % UPLOADED == 0:
            await uploads.put(case.name, await asyncio.to_thread(case.make))
            return "upload"
        (roots / case.name).mkdir()
        for name, data in case.files.items():
            (roots / case.name / name).write_bytes(data)
        return "path"

    async def attempt(number: int, case: Malformed) -> str:
        async with turn:
            kind = await offer(case, number)
            error: MotetError | None = None
            try:
                await client.register(f"bad/{case.name}", case.name, kind=kind)
            except MotetError as caught:
                error = caught
            return verdict(case.name, case.reason, error)

    wrong = [fault for fault in await asyncio.gather(*itertools.starmap(attempt, enumerate(cases))) if fault]
    assert not wrong, "\n".join(wrong)
    assert registry.not_ready() == []
    assert await client.keys() == set() and await client.blobs() == set() and await client.names() == []
    try:
        left = {info.name for info in await uploads.list(ignore_deletes=True)}
    except js_errors.NotFoundError:
        left = set()
    assert left == set()
    await client.register("good", write_adapter(roots / "good"))
    assert await client.names() == ["good"]


async def test_every_malformed_directory_is_refused_with_its_reason(client: Client, roots: Path):
    wrong = []
    for case in malformed_directories():
        case.make(roots / case.name)
        error: MotetError | None = None
        try:
            await client.register(case.name, case.name)
        except MotetError as caught:
            error = caught
        wrong.append(verdict(case.name, case.reason, error))
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert await client.keys() == set()
