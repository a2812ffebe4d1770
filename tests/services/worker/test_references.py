"""Promise: of workers that load a new version at once, one makes the reference and all others compare with it."""

from __future__ import annotations

import asyncio

import pytest

from motet.policies.worker.probe import Reference
from motet.services.worker.references import References


def made(number: int) -> Reference:
    return Reference(base=b"\0" * 4, adapter=bytes([number] * 4), dtype="float32", made_by=f"w{number}", made_unix_ms=number)


@pytest.fixture
async def two(bus) -> tuple[References, References]:
    return References(bus, "none"), References(bus, "none")


async def test_the_first_one_counts_for_all(two):
    first, second = two
    assert await first.get("d1") is None
    results = await asyncio.gather(*(one.make("d1", made(n)) for n, one in enumerate((first, second) * 5)))
    assert len({result.made_by for result in results}) == 1
    assert await first.get("d1") == await second.get("d1") == results[0]
    assert await second.get("d2") is None


async def test_each_quantization_has_its_own_in_one_record(bus, two):
    whole, _ = two
    coarse = References(bus, "int8")
    await whole.make("d1", made(1))
    assert await coarse.get("d1") is None
    assert await coarse.make("d1", made(2)) == made(2)
    assert await whole.get("d1") == made(1) and await coarse.get("d1") == made(2)
