"""Malformed adapters and archives, uploaded as a tenant would: each is refused with its reason, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp

from tests.fuzz.mesh import LIMIT_BYTES, FuzzMesh
from tests.support_malformed import Malformed, malformed

AT_ONCE = 2
BUSY = 429


def corpus(mesh: FuzzMesh) -> list[Malformed]:
    """Every case for the demo's base model."""
    return list(malformed(mesh.shapes, max_adapter_bytes=LIMIT_BYTES, chats=True))


async def fuzz(mesh: FuzzMesh, cases: Sequence[Malformed]) -> tuple[list[str], list[str]]:
    """Upload `cases`. Returns the names of those that were accepted, and a text for each failure."""
    before = await mesh.call("GET", "/v1/adapters")
    turn = asyncio.Semaphore(AT_ONCE)
    accepted: list[str] = []

    async def attempt(case: Malformed) -> str:
        async with turn:
            data = await asyncio.to_thread(case.make)
            status, text = await _upload(mesh, case.name, data)
        if status < 300:
            accepted.append(case.name)
        if status in (400, 413) and case.reason in text:
            return ""
        return f"{case.name}: {status} {text[:300]!r}, expected 400 or 413 with {case.reason!r}"

    wrong = [one for one in await asyncio.gather(*map(attempt, cases)) if one]
    if await mesh.call("GET", "/v1/adapters") != before:
        wrong.append("the list of adapters has changed")
    if trouble := await mesh.trouble():
        wrong.append(trouble)
    return accepted, wrong


async def _upload(mesh: FuzzMesh, name: str, data: bytes) -> tuple[int, str]:
    """The status and message that an upload gets, asking again while others are under way."""
    async with aiohttp.ClientSession() as session:
        while True:
            form = aiohttp.FormData()
            form.add_field("name", f"bad/{name}")
            form.add_field("file", data, filename="adapter.zip")
            async with session.post(f"{mesh.url}/v1/adapters", data=form) as answer:
                body = await answer.json()
                if answer.status == BUSY:
                    await asyncio.sleep(float(answer.headers.get("retry-after", "1")))  # time: as the answer says
                    continue
                return answer.status, str(body.get("error", {}).get("message", body))
