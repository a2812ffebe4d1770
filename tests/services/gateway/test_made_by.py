"""Promise: every answer says which adapter version, base model and engine made it."""

from __future__ import annotations

import msgspec
import orjson
import pytest
from aiohttp import ClientSession

from motet.services.gateway.owner.made_by import HEADERS, VERSION, made_by
from motet.shared.model import AdapterRef, Weighted
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import put_adapter
from tests.support import eventually
from tests.support_worker import worker_limits

LIMITS = worker_limits(base_digest="b" * 32, kv_format="k")
UPPER = Weighted(AdapterRef(name="upper", digest="d" * 64, rank=8, size_bytes=1, version=3))


def test_the_facts_of_an_answer_are_names_with_versions_and_digests():
    made = made_by("demo", [UPPER], LIMITS)
    assert made.headers == {
        "x-motet-adapter": f"upper@3:{'d' * 64}",
        "x-motet-base": f"demo:{'b' * 32}",
        "x-motet-engine": f"native {VERSION}",
    }
    assert "x-motet-adapter" not in made_by("demo", [], LIMITS).headers
    assert made_by("demo", [], None).headers == {"x-motet-base": "demo"}  # the worker is gone


@pytest.mark.parametrize("change", ["engine", "device", "quantization", "kv_cache_dtype", "kv_format", "base_digest"])
def test_whatever_can_change_an_answer_changes_the_fingerprint(change: str):
    before = made_by("demo", [UPPER], LIMITS).fingerprint
    assert before.startswith("fp_") and before == made_by("demo", [UPPER], LIMITS).fingerprint
    assert made_by("demo", [UPPER], msgspec.structs.replace(LIMITS, **{change: "other"})).fingerprint != before
    other = Weighted(msgspec.structs.replace(UPPER.ref, digest="e" * 64))
    assert made_by("demo", [other], LIMITS).fingerprint != before != made_by("demo", [], LIMITS).fingerprint
    renamed = Weighted(msgspec.structs.replace(UPPER.ref, name="alias", version=1))
    assert made_by("demo", [renamed], LIMITS).fingerprint == before  # the same weights


def test_several_adapters_are_all_named_with_the_weights_that_are_not_one():
    other = Weighted(AdapterRef(name="style", digest="e" * 64, rank=4, size_bytes=1, version=1), 0.8)
    made = made_by("demo", [UPPER, other], LIMITS)
    assert made.adapter == f"upper@3:{'d' * 64},style@1:{'e' * 64}*0.8"
    plain = made_by("demo", [UPPER, Weighted(other.ref)], LIMITS)
    assert len({made.fingerprint, plain.fingerprint, made_by("demo", [UPPER], LIMITS).fingerprint}) == 3


async def test_whole_answers_streams_and_repetitions_tell_it(mesh: Mesh, http: ClientSession) -> None:
    await put_adapter(mesh.bus, "upper", version=2, digest="abc")
    await eventually(lambda: (found := mesh.gateway.adapters.resolve("upper")) and found.entry.version == 2)
    mesh.say("a b c")
    url, seen = f"{mesh.url}/v1/completions", []
    body = {"model": "upper", "prompt": "x"}
    for headers in ({"Idempotency-Key": "one"}, {"Idempotency-Key": "one"}):
        async with http.post(url, json=body, headers=headers) as answer:
            seen.append((await answer.json())["system_fingerprint"])
            told = {name: answer.headers.get(name) for name in HEADERS}
            assert told == {"x-motet-adapter": "upper@2:abc", "x-motet-base": "demo", "x-motet-engine": f"native {VERSION}"}
    async with http.post(url, json=body | {"stream": True, "stream_options": {"include_usage": True}}) as answer:
        assert answer.headers["x-motet-adapter"] == "upper@2:abc"
        events = [line.removeprefix(b"data: ") for line in (await answer.read()).split(b"\n\n") if line]
        chunks = [orjson.loads(event) for event in events if event != b"[DONE]"]
        assert len(chunks) >= 3
        seen += [chunk["system_fingerprint"] for chunk in chunks]
    assert len(set(seen)) == 1 and seen[0].startswith("fp_")
    async with http.post(url, json={"prompt": "x"}) as answer:
        assert "x-motet-adapter" not in answer.headers and answer.headers["x-motet-base"] == "demo"
        assert (await answer.json())["system_fingerprint"] != seen[0]
