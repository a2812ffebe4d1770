"""Adapters over HTTP: Motet's resource, and vLLM's run-time endpoints with its exact answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from nats.js.errors import NotFoundError

from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import AdapterExists, AdapterInUse, AdapterNotFound, BadRequest, InvalidAdapter, MotetError
from motet.shared.model import Residency
from motet.shared.wire.registry import AliasAdapter, DeleteAdapter, RegisterAdapter, RegistryOk, RollbackAdapter
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, put_adapter, running_gateway
from tests.support import eventually
from tests.support_worker import FakeWorker, worker_limits

ALREADY = (
    "The lora adapter 'upper' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
)


class FakeRegistry:
    """Publishes whatever it is asked to. `asked` holds the messages, `uploads` the uploaded objects."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.asked: list[RegisterAdapter | AliasAdapter | RollbackAdapter | DeleteAdapter] = []
        self.uploads: list[bytes] = []
        self.refuse: MotetError | None = None

    async def start(self) -> None:
        kinds = {"register": RegisterAdapter, "alias": AliasAdapter, "rollback": RollbackAdapter, "delete": DeleteAdapter}
        for verb, kind in kinds.items():
            await self.bus.serve(verb, subjects.registry(verb), kind, getattr(self, verb), queue="registry")

    def _note(self, message: RegisterAdapter | AliasAdapter | RollbackAdapter | DeleteAdapter) -> None:
        self.asked.append(message)
        if self.refuse is not None:
            raise self.refuse

    async def register(self, message: RegisterAdapter) -> RegistryOk:
        self._note(message)
        if message.kind == "upload":
            store = await self.bus.object_store(subjects.UPLOADS)
            self.uploads.append((await store.get(message.location)).data or b"")
        return RegistryOk(adapters=[await put_adapter(self.bus, message.name, rank=4)])

    async def alias(self, message: AliasAdapter) -> RegistryOk:
        self._note(message)
        digest = f"digest-of-{message.target}"
        return RegistryOk(adapters=[await put_adapter(self.bus, message.name, digest=digest, alias_of=message.target)])

    async def rollback(self, message: RollbackAdapter) -> RegistryOk:
        self._note(message)
        return RegistryOk(adapters=[await put_adapter(self.bus, message.name, digest=f"version-{message.version}")])

    async def delete(self, message: DeleteAdapter) -> RegistryOk:
        self._note(message)
        kv = await self.bus.key_value(subjects.KV_ADAPTERS)
        await kv.delete(f"name.{message.name}")
        return RegistryOk(adapters=[], returns=not message.forget)


@pytest.fixture
async def registry(mesh: Mesh, connect: Connect) -> AsyncIterator[FakeRegistry]:
    registry = FakeRegistry(await connect("registry"))
    await registry.start()
    yield registry


async def load(http: aiohttp.ClientSession, mesh: Mesh, verb: str, **body: object) -> tuple[int, str, object]:
    async with http.post(f"{mesh.url}/v1/{verb}_lora_adapter", json=body) as answer:
        text = await answer.text()
        return answer.status, text, (await answer.json())["error"] if answer.content_type == "application/json" else None


async def test_vllms_endpoints_load_and_unload_with_its_texts(
    mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession
) -> None:
    mesh.say("x")
    answer = await load(http, mesh, "load", lora_name="new", lora_path="/adapters/new")
    assert answer == (200, "Success: LoRA adapter 'new' added successfully.", None)
    async with http.post(f"{mesh.url}/v1/completions", json={"model": "new", "prompt": "x"}) as completion:
        assert completion.status == 200  # the next request finds it
    answer = await load(http, mesh, "unload", lora_name="new", lora_int_id=7)
    assert answer == (200, "Success: LoRA adapter 'new' removed successfully.", None)
    async with http.post(f"{mesh.url}/v1/completions", json={"model": "new", "prompt": "x"}) as completion:
        assert completion.status == 404
    registered, deleted = registry.asked
    assert (registered.name, registered.kind, registered.location, registered.replace) == (
        "new",
        "path",
        "/adapters/new",
        False,
    )
    assert (deleted.name, deleted.force) == ("new", True)


async def test_vllms_endpoints_refuse_with_its_status_codes(
    mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession
) -> None:
    status, _, error = await load(http, mesh, "load", lora_name="x")
    message = "Both 'lora_name' and 'lora_path' must be provided."
    assert (status, error) == (400, {"message": message, "type": "InvalidUserInput", "param": None, "code": 400})
    assert (await load(http, mesh, "unload"))[0] == 400
    registry.refuse = AdapterExists("taken")
    status, _, error = await load(http, mesh, "load", lora_name="upper", lora_path="/x")
    assert (status, error) == (400, {"message": ALREADY, "type": "InvalidUserInput", "param": None, "code": 400})
    registry.refuse = InvalidAdapter("rank 999 is over the limit of 64")
    status, _, error = await load(http, mesh, "load", lora_name="big", lora_path="/x")
    assert (status, error["type"], error["message"]) == (400, "BadRequestError", "rank 999 is over the limit of 64")  # type: ignore[index]
    registry.refuse = AdapterNotFound("no")
    status, _, error = await load(http, mesh, "unload", lora_name="ghost")
    missing = "The lora adapter 'ghost' cannot be found."
    assert (status, error) == (404, {"message": missing, "type": "NotFoundError", "param": None, "code": 404})


async def test_a_hub_id_is_told_from_a_path_and_load_inplace_replaces(
    mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession
) -> None:
    for path in ("org/adapter", "./org/adapter", "a/b/c"):
        assert (await load(http, mesh, "load", lora_name="new", lora_path=path, load_inplace=True))[0] == 200
    assert [(asked.kind, asked.replace) for asked in registry.asked] == [("any", True), ("path", True), ("path", True)]  # type: ignore[union-attr]


async def test_the_adapter_resource_tells_everything_about_an_adapter(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    mesh.first.adapters = [Residency("digest-of-upper", 8, 4096, "device")]
    await mesh.first.snapshot()
    await eventually(lambda: mesh.gateway.fleet.tiers("digest-of-upper"))
    async with http.get(f"{mesh.url}/v1/adapters/upper") as answer:
        body = await answer.json()
    assert body == {
        "name": "upper",
        "object": "adapter",
        "digest": "digest-of-upper",
        "version": 1,
        "alias_of": None,
        "base_model": "demo",
        "rank": 8,
        "modules": ["q_proj", "v_proj"],
        "layers": 2,
        "family": None,
        "sites": None,
        "kind": "lora",
        "targets": [],
        "workers": ["w1", "w2"],
        "dtype": "F32",
        "size_bytes": 4096,
        "source": "path:upper",
        "tenant": None,
        "created": 1_700_000_000,
        "updated": 1_700_000_000,
        "resident": {"w1": "device"},
        "left_out": [],
        "follows": None,
        "older_versions": [],
        "chat": None,
        "pinned_to": [],
        "placed_on": [],
        "quarantine": None,
    }
    async with http.get(f"{mesh.url}/v1/adapters") as answer:
        assert [adapter["name"] for adapter in (await answer.json())["data"]] == ["upper"]
    async with http.get(f"{mesh.url}/v1/adapters/ghost") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "adapter_not_found")


async def test_an_image_adapter_is_shown_with_its_family_and_sites(mesh: Mesh, http: aiohttp.ClientSession, bus) -> None:
    facts = {"modules": ("conv1", "to_q"), "layers": 0, "family": "sd15", "sites": 42}
    await put_adapter(bus, "watercolor", **facts)
    await eventually(lambda: mesh.gateway.adapters.resolve("watercolor", "") is not None)
    async with http.get(f"{mesh.url}/v1/adapters/watercolor") as answer:
        card = await answer.json()
    assert {key: card[key] for key in facts} == facts | {"modules": ["conv1", "to_q"]}
    async with http.get(f"{mesh.url}/v1/models") as answer:
        models = {model["id"]: model for model in (await answer.json())["data"]}
    assert (models["watercolor"]["family"], models["watercolor"]["sites"]) == ("sd15", 42)
    assert all("family" not in models[name] and "sites" not in models[name] for name in ("demo", "upper"))


async def test_an_adapter_of_other_layers_is_shown_with_the_workers_that_can_run_it(
    mesh: Mesh, http: aiohttp.ClientSession, bus: Bus, connect: Connect
) -> None:
    layers = ("lm_head", "model.layers.*.mlp.fc1")
    await put_adapter(bus, "outer", modules=("fc1", "lm_head"), targets=layers)
    await eventually(lambda: mesh.gateway.adapters.resolve("outer", "") is not None)

    async def card() -> dict[str, Any]:
        async with http.get(f"{mesh.url}/v1/adapters/outer") as answer:
            return dict(await answer.json())

    first = await card()
    assert (first["kind"], tuple(first["targets"]), first["workers"]) == ("peft", layers, [])
    takes = {"w3": (*layers, "model.layers.*.mlp.fc2"), "w4": layers[:1]}
    for worker_id, targets in takes.items():
        await FakeWorker(await connect(worker_id), worker_id, limits=worker_limits(lora_targets=targets)).start()
    await eventually(lambda: {"w3", "w4"} <= {known.worker_id for known in mesh.gateway.fleet.workers()})
    assert (await card())["workers"] == ["w3"]


async def test_adapters_are_added_by_path_hub_id_alias_and_upload(
    mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession
) -> None:
    url = f"{mesh.url}/v1/adapters"
    bodies = [
        {"name": "a", "path": "/x"},
        {"name": "b", "hub_id": "org/b", "replace": True},
        {"name": "c", "alias_of": "upper"},
    ]
    for body in bodies:
        async with http.post(url, json=body) as answer:
            assert (answer.status, (await answer.json())["name"]) == (201, body["name"])
    archive = b"archive" * 100_000
    form = aiohttp.FormData({"name": "d"})
    form.add_field("file", archive, filename="d.zip")
    async with http.post(url, data=form) as answer:
        assert (answer.status, (await answer.json())["rank"]) == (201, 4)
    a, b, c, d = registry.asked
    assert [(m.kind, m.location) for m in (a, b)] == [("path", "/x"), ("hub", "org/b")]  # type: ignore[union-attr]
    assert (c.target, d.kind, registry.uploads) == ("upper", "upload", [archive])  # type: ignore[union-attr]
    async with http.get(f"{mesh.url}/v1/adapters/c") as answer:
        assert (await answer.json())["alias_of"] == "upper"
    store = await mesh.bus.object_store(subjects.UPLOADS)
    with pytest.raises(NotFoundError):  # it was on its way only
        await store.list(ignore_deletes=True)


async def test_a_source_of_any_kind_is_passed_on_but_no_upload_of_others(
    mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession
) -> None:
    url = f"{mesh.url}/v1/adapters"
    for name, source in (("a", "s3://bucket/key"), ("b", "s3:bucket/key"), ("c", "hub:org/c@main")):
        async with http.post(url, json={"name": name, "source": source}) as answer:
            assert answer.status == 201, await answer.text()
    asked = [(m.kind, m.location) for m in registry.asked]  # type: ignore[union-attr]
    assert asked == [("s3", "bucket/key"), ("s3", "bucket/key"), ("hub", "org/c@main")]
    registry.refuse = BadRequest("kind 'ftp': one of path, hub, upload, any is expected", param="kind")
    for source in ("upload:key", "no-kind", "ftp:", "ftp://host/a"):
        async with http.post(url, json={"name": "x", "source": source}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "source"), source


async def test_an_alias_follows_unless_its_version_is_pinned_and_a_name_goes_back_to_a_version(
    mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession
) -> None:
    url = f"{mesh.url}/v1/adapters"
    for body in ({"name": "a", "alias_of": "upper"}, {"name": "b", "alias_of": "upper", "pin_version": True}):
        async with http.post(url, json=body) as answer:
            assert answer.status == 201
    async with http.post(url, json={"name": "c", "hub_id": "org/c", "pin_version": True}) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "pin_version")
    async with http.patch(f"{url}/upper", json={"version": 3}) as answer:
        assert (answer.status, (await answer.json())["digest"]) == (200, "version-3")
    for wrong in ({}, {"version": -1}, {"version": "3"}, {"versions": 3}):
        async with http.patch(f"{url}/upper", json=wrong) as answer:
            assert answer.status == 400, wrong
    async with http.delete(f"{url}/upper?forget=true") as answer:
        assert (await answer.json())["returns_at_start"] is False
    a, b, back, gone = registry.asked
    assert (a.follows, b.follows, back.version, gone.forget) == (True, False, 3, True)  # type: ignore[union-attr]


async def test_a_delete_in_use_is_a_409_unless_forced(mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession) -> None:
    registry.refuse = AdapterInUse("2 requests run on it")
    async with http.delete(f"{mesh.url}/v1/adapters/upper") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (409, "adapter_in_use")
    registry.refuse = None
    async with http.delete(f"{mesh.url}/v1/adapters/upper?force=true") as answer:
        gone = {"name": "upper", "object": "adapter", "deleted": True, "returns_at_start": True}
        assert (answer.status, await answer.json()) == (200, gone)
    assert [asked.force for asked in registry.asked] == [False, True]  # type: ignore[union-attr]


async def test_what_is_wrong_with_an_addition_is_named(mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession) -> None:
    url = f"{mesh.url}/v1/adapters"
    registry.refuse = InvalidAdapter("path /etc is outside the allowed roots", param="location")
    for body, param in [
        ({"name": "x"}, "path"),
        ({"name": "x", "path": "/x", "hub_id": "a/b"}, "path"),
        ({"path": "/x"}, "name"),
        ({"name": "", "path": "/x"}, "name"),
        ({"name": "demo", "path": "/x"}, "name"),
        ({"name": "x", "path": ""}, "path"),
        ({"name": "x", "path": 7}, "path"),
        ({"name": "x", "path": "/etc"}, "path"),
        ({"name": "x", "hub_id": "a/b"}, "hub_id"),
    ]:
        async with http.post(url, json=body) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (400, param), (body, error)
    async with http.delete(f"{url}/upper?force=perhaps") as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "force")
    form = aiohttp.FormData({"name": "x", "replace": "perhaps"})
    form.add_field("file", b"x", filename="x.zip")
    async with http.post(url, data=form) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "replace")
    nameless = aiohttp.FormData()
    nameless.add_field("file", b"x", filename="x.zip")
    async with http.post(url, data=nameless) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "name")
    async with http.post(url, data=b"junk", headers={"content-type": "multipart/form-data"}) as answer:
        assert answer.status == 400


async def test_without_a_registry_adapters_cannot_change(mesh: Mesh, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{mesh.url}/v1/adapters", json={"name": "x", "path": "/x"}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (503, "unavailable")


async def test_uploads_at_once_are_bounded_and_so_is_their_bucket(
    mesh: Mesh, registry: FakeRegistry, http: aiohttp.ClientSession
) -> None:
    head = b"POST /v1/adapters HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    slow = [
        await asyncio.open_connection("127.0.0.1", mesh.gateway.port) for _ in range(mesh.gateway.config.requests.max_uploads)
    ]
    for _, writer in slow:
        writer.write(head + b"content-length: 1000\r\n\r\n--b\r\n")

    async def upload() -> int:
        form = aiohttp.FormData({"name": "sent"})
        form.add_field("file", b"archive", filename="a.zip")
        async with http.post(f"{mesh.url}/v1/adapters", data=form) as answer:
            if answer.status == 429:
                assert answer.headers["retry-after"]
            return answer.status

    async def refused() -> bool:
        return await upload() == 429

    async def taken() -> bool:
        return await upload() == 201

    await eventually(refused)
    for _, writer in slow:
        writer.close()
    await eventually(taken)
    info = await mesh.bus.js.stream_info(f"OBJ_{subjects.UPLOADS}")
    assert 0 < (info.config.max_bytes or 0) <= 4 << 30


async def test_an_upload_above_its_limit_is_refused_before_it_is_read(
    registry: FakeRegistry, nats_url: str, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with running_gateway(nats_url, tmp_path, instance_id="g2", max_upload_bytes=1024) as gateway:
        form = aiohttp.FormData({"name": "sent"})
        form.add_field("file", b"x" * 1024, filename="a.zip")
        async with http.post(f"http://127.0.0.1:{gateway.port}/v1/adapters", data=form) as answer:
            assert answer.status == 413
            assert "the limit is 1024" in (await answer.json())["error"]["message"]
