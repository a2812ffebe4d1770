"""Promise: from a hub come two files of the announced size, in bounded time, from addresses that the operator allows."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from motet.services.registry.files import CONFIG, WEIGHTS, PeftFiles
from motet.services.registry.hub import HUB_ID, HubOptions, HubSource, is_public
from motet.shared.errors import BadRequest, InvalidAdapter, MotetError, TooLarge, Unavailable
from tests.services.registry.conftest import Client
from tests.support_adapters import peft_config, random_tensors, safetensors_bytes

MAX = 1 << 20
GOOD = {CONFIG: peft_config(), WEIGHTS: safetensors_bytes(random_tensors())}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A fake hub that serves what a download needs: model info and two files of `some/adapter`. Tests change its answers."""

    def __init__(self) -> None:
        self.port = 0
        self.files: dict[str, bytes] = dict(GOOD)
        self.sizes: dict[str, int | None] = {name: len(data) for name, data in GOOD.items()}
        self.hashes = {name: hashlib.sha256(data).hexdigest() for name, data in GOOD.items()}
        self.redirect = ""  # where the weights are
        self.asked: list[tuple[str, str]] = []  # path, authorization
        self.pause = asyncio.Event()
        self.pause.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def info(self, request: web.Request) -> web.Response:
        self.note(request)
        assert request.query["blobs"] == "true", "sizes are asked for"
        siblings = [
            {"rfilename": name, "size": size, "lfs": {"sha256": self.hashes[name]}} for name, size in self.sizes.items()
        ]
        return web.json_response({"id": "some/adapter", "sha": COMMIT, "siblings": siblings, "private": False})

    async def file(self, request: web.Request) -> web.StreamResponse:
        self.note(request)
        name = request.match_info["name"]
        if self.redirect and name == WEIGHTS and request.path.startswith("/some"):
            raise web.HTTPFound(self.redirect)
        response = web.StreamResponse()
        await response.prepare(request)
        data = self.files[name]
        await response.write(data[: len(data) // 2])
        await self.pause.wait()
        await response.write(data[len(data) // 2 :])
        return response

    def note(self, request: web.Request) -> None:
        self.asked.append((request.path, request.headers.get("Authorization", "")))


Serve = Callable[[], Awaitable[Hub]]


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serve]:
    """Starts hubs on this machine."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running: list[tuple[web.AppRunner, Hub]] = []

    async def start() -> Hub:
        hub = Hub()
        app = web.Application()
        app.router.add_get("/api/models/some/adapter", hub.info)
        app.router.add_get("/api/models/some/adapter/revision/main", hub.info)
        app.router.add_get(f"/some/adapter/resolve/{COMMIT}/{{name}}", hub.file)
        app.router.add_get("/elsewhere/{name}", hub.file)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        hub.port = runner.addresses[0][1]
        running.append((runner, hub))
        return hub

    yield start
    for runner, hub in running:
        hub.pause.set()
        await runner.cleanup()


@pytest.fixture
async def hub(serve: Serve) -> Hub:
    return await serve()


def source(hub: Hub, **options: Any) -> HubSource:
    return HubSource(HubOptions(**({"endpoint": hub.url, "max_bytes": MAX} | options)))


async def refused(hub: Hub, location: str = "some/adapter", **options: Any) -> MotetError:
    try:
        with await source(hub, **options).fetch(location) as files:
            raise AssertionError(f"{files.source} was taken")
    except MotetError as error:
        assert error.param == "location"
        return error


def check(files: PeftFiles) -> None:
    with files:
        assert (files.config_json, files.weights.read(), files.size_bytes) == (GOOD[CONFIG], GOOD[WEIGHTS], len(GOOD[WEIGHTS]))
        assert files.source == f"hub:some/adapter@{COMMIT}"


@pytest.mark.parametrize("location", ["some/adapter", "some/adapter@main"])
async def test_an_adapter_is_fetched_pinned_to_its_commit(hub: Hub, location: str):
    check(await source(hub).fetch(location))
    assert [path for path, _ in hub.asked[1:]] == [f"/some/adapter/resolve/{COMMIT}/{name}" for name in (CONFIG, WEIGHTS)]


@pytest.mark.parametrize(
    "location", ["a/b", "A_1/b.c-d", "a/b@main", "a/b@v1.0", "a/b@refs/pr/12", "a/b@fix--it", "a/b@" + COMMIT, "a/b@x_y/z-"]
)
def test_names_and_revisions_of_the_hub_are_taken(location: str):
    assert HUB_ID.fullmatch(location)


@pytest.mark.parametrize(
    "location",
    [
        *("noslash", "../etc/passwd", "a/b/c", "/abs/path", "https://host/a/b", "a/b@", "a/" + "b" * 300),
        *("a/..", "a/b..c", "a/b.", "a/-b", "a--b/c", ".a/b", "a/b@main@main", "a/b\n", "ä/b"),
        *("a/b@..", "a/b@../..", "a/b@x/../y", "a/b@/etc", "a/b@x//y", "a/b@x/", "a/b@.x", "a/b@x/.y", "a/b@x.", "a/b@x.lock"),
        *("a/b@main\n", "a/b@%2e%2e", "a/b@x?y", "a/b@x#y"),
    ],
)
async def test_what_is_no_hub_id_is_refused_without_asking_the_hub(hub: Hub, location: str):
    error = await refused(hub, location)
    assert isinstance(error, BadRequest) and "not a hub id" in error.message and len(error.message) < 300
    assert hub.asked == []


async def test_only_listed_repositories_are_asked_for(hub: Hub):
    error = await refused(hub, repositories=("acme/*", "some/other"))
    assert isinstance(error, InvalidAdapter) and "takes adapters from acme/*, some/other only" in error.message
    assert hub.asked == []
    check(await source(hub, repositories=("acme/*", "some/ada*")).fetch("some/adapter"))


async def test_what_the_hub_does_not_have_is_refused_and_a_silent_or_broken_hub_is_unavailable(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    error = await refused(hub, "nobody/nothing")
    assert isinstance(error, InvalidAdapter) and "the hub has no nobody/nothing, or it is private" in error.message
    error = await refused(hub, endpoint="http://127.0.0.1:9")
    assert isinstance(error, Unavailable) and "register it from a path or an upload" in error.message
    del hub.sizes[CONFIG]
    assert f"holds no {CONFIG}" in (await refused(hub)).message
    hub.sizes.clear()
    assert f"holds no {WEIGHTS}" in (await refused(hub)).message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in (await refused(hub)).message


async def test_a_size_over_the_limit_is_refused_before_the_download(hub: Hub):
    error = await refused(hub, max_bytes=len(GOOD[WEIGHTS]) - 1)
    assert isinstance(error, TooLarge) and f"{WEIGHTS} has {len(GOOD[WEIGHTS])} bytes" in error.message
    hub.sizes[WEIGHTS] = None
    assert isinstance(await refused(hub), Unavailable)
    assert len(hub.asked) == 2, "only the two questions for sizes"


async def test_more_fewer_or_other_bytes_than_announced_are_refused(hub: Hub):
    hub.files[WEIGHTS] = GOOD[WEIGHTS] + bytes(4 << 20)
    error = await refused(hub)
    assert isinstance(error, TooLarge) and "more than" in error.message
    hub.files[WEIGHTS] = GOOD[WEIGHTS][:-1]
    assert isinstance(await refused(hub), Unavailable)
    hub.files[WEIGHTS] = GOOD[WEIGHTS][:-1] + b"!"
    error = await refused(hub)
    assert isinstance(error, Unavailable) and "adapter_model.safetensors does not match" in error.message


async def test_a_download_that_does_not_end_is_given_up(hub: Hub):
    hub.pause.clear()
    error = await refused(hub, timeout_s=0.3)
    assert isinstance(error, Unavailable) and "longer than 0.3 s" in error.message


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/elsewhere/" + WEIGHTS,
        "http://localhost:{port}/elsewhere/" + WEIGHTS,
        "http://[::1]:{port}/x",
        "http://[::ffff:127.0.0.1]:{port}/x",
        "http://2130706433:{port}/x",
        "http://0.0.0.0:{port}/x",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/x",
        "http://[fe80::1]/x",
        "http://[64:ff9b::7f00:1]/x",
        "file:///etc/passwd",
        "ftp://ftp.example.com/x",
    ],
)
async def test_a_redirect_to_a_private_address_is_refused_without_a_connection(serve: Serve, target: str):
    hub, inside = await serve(), await serve()
    hub.redirect = target.format(port=inside.port)
    error = await refused(hub)
    assert error.status in (400, 503) and inside.asked == []
    if "127.0.0.1:" in target and "ffff" not in target:
        assert isinstance(error, InvalidAdapter) and "no public address" in error.message


async def test_a_redirect_to_a_host_the_operator_named_is_followed_without_the_token(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub, mirror = await serve(), await serve()
    hub.redirect = f"{mirror.url}/elsewhere/{WEIGHTS}"
    check(await source(hub, private_hosts=(f"127.0.0.1:{mirror.port}",)).fetch("some/adapter"))
    assert {authorization for _, authorization in hub.asked} == {"Bearer hf_secret"}
    assert [authorization for _, authorization in mirror.asked] == [""]


async def test_redirects_end(hub: Hub):
    hub.redirect = f"/some/adapter/resolve/{COMMIT}/{WEIGHTS}"
    error = await refused(hub)
    assert isinstance(error, Unavailable) and "redirects more than" in error.message


def test_public_addresses_are_told_from_others():
    assert all(map(is_public, ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"]))
    others = "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.0.1 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255"
    others6 = "::1 :: fe80::1%eth0 fc00::1 ff02::1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:7f00:1::"
    assert not any(map(is_public, f"{others} {others6}".split()))


async def test_a_registry_takes_adapters_from_the_hub_it_was_given(hub: Hub, start_registry, connect, roots: Path):
    await start_registry(hub_endpoint=hub.url, hub_repositories="some/*, other/one")
    client = Client(await connect("gateway"), roots)
    info = await client.register("mine", "some/adapter", kind="hub")
    assert info.version.source == f"hub:some/adapter@{COMMIT}" and info.version.rank == 4
    error = await client.refused("other", "acme/adapter", kind="hub")
    assert error.param == "location" and "takes adapters from some/*, other/one only" in error.message
