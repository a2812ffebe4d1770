"""Promise: a registry of an image model takes LoRA files as people have them, and its adapters live as those of text do."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from motet.services.registry.files import IMAGE, LORA_FILE
from motet.services.registry.hub import HubOptions, HubSource
from motet.services.registry.sources import SOURCES
from motet.shared import subjects
from motet.shared.adapter_blob import digest_of, read_site_index
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, InvalidAdapter, MotetError, TooLarge
from motet.shared.image_shapes import Site
from motet.shared.wire.registry import DeleteAdapter, RegisterAdapter, RegistryOk, RegistryReply
from tests.services.registry.conftest import Client, StartRegistry
from tests.services.registry.test_hub import COMMIT, Hub, hub, serve  # noqa: F401
from tests.support import eventually
from tests.support_adapters import safetensors_bytes, write_adapter
from tests.support_images import TINY, as_kohya, as_peft, random_pairs, shapes, write_checkpoint
from tests.support_malformed import tar_of, zip_of

BASE = shapes("sd15")
LIMIT_BYTES = 8 << 20


def attention(family: str = "sd15", every: int = 1) -> list[Site]:
    return [one for one in shapes(family).sites if ".attn" in one.name][::every]


def lora(seed: int = 0, rank: int = 4, family: str = "sd15", dtype: str = "F32") -> bytes:
    """A file in PEFT's layout."""
    return safetensors_bytes(as_peft(random_pairs(attention(family), (rank,), seed)), dtype)


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], str]:
    """Writes the configurations of a tiny checkpoint of a family."""
    return lambda family: str(write_checkpoint(tmp_path / f"tiny-{family}", *TINY[family]))


@pytest.fixture
async def artist(start_registry: StartRegistry, connect, roots: Path, checkpoint) -> Client:
    """A client of a registry for a tiny Stable Diffusion 1.5."""
    await start_registry(model=checkpoint("sd15"), max_adapter_bytes=LIMIT_BYTES)
    return Client(await connect("gateway"), roots)


async def test_an_image_adapter_is_published_with_family_sites_and_roles(artist: Client, roots: Path):
    pairs = random_pairs(BASE.sites, (4, 12))
    alphas = dict.fromkeys(pairs, 8.0)
    info = await artist.register("styles/all.v1", write(roots / "all.safetensors", safetensors_bytes(as_kohya(pairs, alphas))))
    version = info.version
    assert (version.family, version.sites, version.rank, version.layers) == ("sd15", len(BASE.sites), 12, 0)
    assert version.dtype == "F32" and version.base_model == "tiny-sd15" and version.source == "path:all.safetensors"
    assert {"to_q", "to_out", "ff", "conv1", "conv_in", "q_proj", "fc1"} <= set(version.modules)
    assert list(version.modules) == sorted(set(version.modules)) and len(version.modules) < 32
    store = await artist.bus.object_store(subjects.BLOBS)
    blob = (await store.get(version.digest)).data
    index = read_site_index(blob, len(blob))
    assert digest_of(blob) == version.digest and len(blob) == version.size_bytes
    assert (index.sites, index.rank, index.dtype) == (len(pairs), 12, "F32")


async def test_one_adapter_in_two_layouts_is_one_version(artist: Client, roots: Path):
    pairs = random_pairs(attention())
    first = await artist.register("peft", write(roots / "a.safetensors", safetensors_bytes(as_peft(pairs))))
    second = await artist.register("kohya", write(roots / "b.safetensors", safetensors_bytes(as_kohya(pairs, {}))))
    assert first.version.digest == second.version.digest
    assert await artist.blobs() == {first.version.digest}


@pytest.mark.parametrize("family", ["sd2", "sdxl"])
async def test_other_families_have_registries_of_their_own(start_registry, connect, roots: Path, checkpoint, family: str):
    await start_registry(model=checkpoint(family))
    client = Client(await connect("gateway"), roots)
    info = await client.register("a", write(roots / "a.safetensors", lora(family=family, dtype="BF16")))
    assert (info.version.family, info.version.sites, info.version.dtype) == (family, len(attention(family)), "BF16")


async def test_versions_aliases_rollback_tenants_and_deletion_work_as_for_text(artist: Client, roots: Path, connect):
    first = await artist.register("style", write(roots / "1.safetensors", lora(1)))
    alias = await artist.alias("latest", "style", follows=True)
    second = await artist.register("style", write(roots / "2.safetensors", lora(2, rank=8)), replace=True)
    assert (first.entry.version, second.entry.version, alias.entry.digest) == (1, 2, first.entry.digest)
    watch = AdapterWatch(await connect("watcher"))
    await watch.start()
    await eventually(lambda: (seen := watch.resolve("latest", "")) is not None and seen.entry.digest == second.entry.digest)
    assert (await artist.rollback("style")).version.digest == first.version.digest
    await eventually(lambda: (seen := watch.resolve("latest", "")) is not None and seen.version.rank == 4)

    ask = RegisterAdapter(name="style", kind="path", location="2.safetensors", tenant="acme", actor="key-1")
    (own,) = await artist.ask("register", ask)
    assert (own.entry.tenant, own.version.digest, own.entry.version) == ("acme", second.version.digest, 1)
    await eventually(lambda: watch.resolve("style", "acme") is not None)
    assert await artist.names(tenant="umbrella") == ["latest", "style"]
    await artist.delete("latest")
    await artist.delete("style")
    assert await artist.names() == []


# ---- where it lies


def folder(name: str) -> dict[str, bytes]:
    return {name: lora(), "README.md": b"hello", "optimizer.bin": b"\x80\x04."}


@pytest.mark.parametrize("name", [LORA_FILE, "My style (v1).safetensors"])
async def test_the_one_lora_file_of_a_folder_or_an_archive_is_found(artist: Client, roots: Path, name: str):
    files = folder(name)
    for file, data in files.items():
        write(roots / "style" / file, data)
    digests = {(await artist.register("folder", "style")).version.digest}
    inner = {f"style/{file}": data for file, data in files.items()} | {f"__MACOSX/style/._{name}": b"\0\5\x16\7"}
    uploads = await artist.bus.object_store(subjects.UPLOADS)
    for number, data in enumerate((zip_of(inner), tar_of(inner), gzip.compress(tar_of(inner)), files[name])):
        digests.add((await artist.register(f"path-{number}", write(roots / f"file{number}", data))).version.digest)
        await uploads.put(f"upload-{number}", data)
        info = await artist.register(f"upload-{number}", f"upload-{number}", kind="upload")
        digests.add(info.version.digest)
    assert len(digests) == 1


@pytest.mark.parametrize("pack", [zip_of, tar_of])
@pytest.mark.parametrize("others", [("a.safetensors",), ("z.safetensors",), ("a.safetensors", "z.safetensors")])
async def test_a_file_with_the_name_of_diffusers_goes_before_others_in_any_order(
    artist: Client, roots: Path, pack: Callable[[Mapping[str, bytes]], bytes], others: tuple[str, ...]
):
    alone = await artist.register("alone", write(roots / "alone.safetensors", lora(7)))
    noise = {name: lora(1, rank=8) + bytes(1000) for name in others}
    for number, members in enumerate(({LORA_FILE: lora(7)} | noise, noise | {LORA_FILE: lora(7)})):
        info = await artist.register(f"packed-{number}", write(roots / f"p{number}", pack(members)))
        assert info.version.digest == alone.version.digest
    for name, data in ({LORA_FILE: lora(7)} | noise).items():
        write(roots / "many" / name, data)
    assert (await artist.register("folder", "many")).version.digest == alone.version.digest


async def test_several_files_none_and_pickles_are_refused_by_name(artist: Client, roots: Path):
    cases: list[tuple[str, dict[str, bytes], str]] = [
        ("several", {"a.safetensors": lora(), "b.safetensors": lora(1)}, "holds 2 safetensors files (a.safetensors, b.saf"),
        ("crowd", {f"{n}.safetensors": b"" for n in range(9)}, "holds 9 safetensors files (0.safetensors, 1.safetensors"),
        ("none", {"README.md": b"hello"}, f"holds no LoRA file ({LORA_FILE}"),
        (
            "bin",
            {"pytorch_lora_weights.bin": b"\x80"},
            "pytorch_lora_weights.bin but no safetensors file: pickle files can run",
        ),
        ("ckpt", {"style.ckpt": b"\x80"}, "style.ckpt but no safetensors file: pickle"),
        ("pt", {"style.pt": b"\x80"}, "style.pt but no safetensors file: pickle"),
        ("hidden", {"._style.safetensors": b"\0"}, "holds no LoRA file"),
    ]
    for name, files, reason in cases:
        for file, data in files.items():
            write(roots / name / file, data)
        locations = [name, *(write(roots / f"{name}.{pack.__name__}", pack(files)) for pack in (zip_of, tar_of))]
        for location in locations:
            error = await artist.refused(name, location)
            assert isinstance(error, InvalidAdapter) and error.param == "location" and reason in error.message, error.message
    twins = {f"{where}/style.safetensors": lora() for where in "ab"}
    for pack in (zip_of, tar_of):
        error = await artist.refused("twins", write(roots / "twins", pack(twins)))
        assert "more than one style.safetensors" in error.message
    for suffix in ("bin", "pt", "ckpt", "pth"):
        error = await artist.refused("pickle", write(roots / f"style.{suffix}", b"\x80"))
        assert f"style.{suffix} is a pickle file" in error.message
    assert await artist.keys() == set()


async def test_paths_and_sizes_are_confined_as_for_text(artist: Client, roots: Path, tmp_path: Path):
    write(tmp_path / "secret.safetensors", lora())
    (roots / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (roots / "linked").mkdir()
    (roots / "linked" / "x.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (roots / "dir").mkdir()
    (roots / "dir" / "x.safetensors").mkdir()
    with (roots / "large.safetensors").open("wb") as sparse:
        sparse.write(lora())
        sparse.truncate(LIMIT_BYTES + 1)
    bomb = {"a.safetensors": bytes(64 << 20)}
    cases: list[tuple[str | Path, type[MotetError], str]] = [
        ("../secret.safetensors", InvalidAdapter, "outside the allowed roots"),
        ("link.safetensors", InvalidAdapter, "outside the allowed roots"),
        ("linked", InvalidAdapter, "x.safetensors is a link to outside"),
        ("dir", InvalidAdapter, "x.safetensors is not a plain file"),
        ("large.safetensors", TooLarge, f"has {LIMIT_BYTES + 1} bytes, the limit is {LIMIT_BYTES}"),
        (write(roots / "bomb.zip", zip_of(bomb)), TooLarge, "the limit is"),
        (write(roots / "bomb.tar.gz", gzip.compress(tar_of(bomb))), TooLarge, "the limit is"),
        (write(roots / "up.zip", zip_of({"../x.safetensors": lora()})), InvalidAdapter, "points outside the archive"),
        (write(roots / "text.safetensors", b"hello"), InvalidAdapter, "not a safetensors file"),
        (write(roots / "text", b"hello"), InvalidAdapter, "not a readable zip or tar archive"),
    ]
    for location, kind, reason in cases:
        error = await artist.refused("a", location)
        assert isinstance(error, kind) and reason in error.message, (location, error.message)
    assert await artist.keys() == set()


async def test_the_operators_directory_may_hold_folders_and_bare_files(
    start_registry, connect, roots: Path, checkpoint, tmp_path: Path
):
    own = tmp_path / "own"
    write(own / "watercolor.safetensors", lora(1))
    write(own / "v1.2.safetensors", lora(2))
    write(own / "team" / "ink" / LORA_FILE, lora(3))
    write(own / "team" / "notes.txt", b"")
    write(own / "two" / "a.safetensors", lora(4))
    write(own / "two" / "b.safetensors", lora(5))
    write(own / "old.ckpt", b"\x80")
    half = {f"{attention()[0].path}.lora_A.weight": np.ones((4, 32))}
    write(own / "half.safetensors", safetensors_bytes(half))
    registry = await start_registry(model=checkpoint("sd15"), adapters_dir=str(own))
    client = Client(await connect("gateway"), roots)
    await eventually(lambda: registry.not_ready() == [])
    assert await client.names() == ["team/ink", "v1.2", "watercolor"]
    sources = {info.entry.name: info.version.source for info in registry.adapters.visible("")}
    assert sources["team/ink"] == "path:team/ink" and sources["watercolor"] == "path:watercolor.safetensors"
    await eventually(lambda: registry.adapters.refused.total == 3)
    for name, reason in (
        ("two", "2 safetensors files"),
        ("old", "pickle file"),
        ("half", "lora_B (lora_up) of the same module is missing"),
    ):
        assert reason in (registry.adapters.refused.reason(name) or "")
    for name in ("watercolor", "team/ink"):
        ask = DeleteAdapter(name=name)
        reply = await client.bus.request(subjects.registry("delete"), ask, RegistryReply, timeout_s=30)
        assert isinstance(reply, RegistryOk) and reply.returns


async def test_a_repository_of_the_hub_gives_its_lora_file(hub: Hub):  # noqa: F811
    source = HubSource(HubOptions(endpoint=hub.url, max_bytes=LIMIT_BYTES))
    source.layout = IMAGE
    data = lora()
    hub.files = {"my style.safetensors": data}
    hub.sizes = {"my style.safetensors": len(data), "checkpoint-500/x.safetensors": 10, "README.md": 5}
    hub.hashes = dict.fromkeys(hub.sizes, "")
    with await source.fetch("some/adapter") as files:
        assert (files.weights.read(), files.config_json, files.source) == (data, b"", f"hub:some/adapter@{COMMIT}")
    assert len([path for path, _ in hub.asked if "/resolve/" in path]) == 1
    hub.sizes["other.safetensors"] = 10
    hub.hashes["other.safetensors"] = ""
    with pytest.raises(InvalidAdapter, match=r"2 safetensors files \(my style.safetensors, other.safetensors\)"):
        await source.fetch("some/adapter")
    hub.sizes = {"my style.safetensors": LIMIT_BYTES + 1}
    hub.hashes = dict.fromkeys(hub.sizes, "")
    with pytest.raises(TooLarge, match=r"my style\.safetensors has"):
        await source.fetch("some/adapter")
    hub.sizes = {"pytorch_lora_weights.bin": 10}
    hub.hashes = dict.fromkeys(hub.sizes, "")
    with pytest.raises(InvalidAdapter, match=r"on the hub holds pytorch_lora_weights\.bin .* never opened"):
        await source.fetch("some/adapter")


async def test_every_source_is_told_the_layout_of_the_base(start_registry, checkpoint, monkeypatch: pytest.MonkeyPatch):
    opened = []

    def opening(config, store):
        opened.append(HubSource(config.hub))
        return opened[-1]

    monkeypatch.setitem(SOURCES, "shelf", opening)
    await start_registry(model=checkpoint("sd15"))
    assert opened[0].layout is IMAGE


# ---- bases and the other modality


async def test_a_base_that_is_not_served_stops_the_start_with_its_field(start_registry, tmp_path: Path):
    index, parts = TINY["sd15"]
    wrong = parts | {"unet": parts["unet"] | {"class_embed_type": "timestep"}}
    for name, (told, configs), reason in (
        ("field", (index, wrong), "unet/config.json: class_embed_type"),
        ("pipeline", (index | {"_class_name": "FluxPipeline"}, parts), "model_index.json: _class_name is 'FluxPipeline'"),
        ("part", (index, {"unet": parts["unet"]}), "text_encoder/config.json"),
    ):
        with pytest.raises(ConfigError, match="--model: ") as refused:
            await start_registry(model=str(write_checkpoint(tmp_path / name, told, configs)))
        assert reason in str(refused.value)


async def test_a_text_adapter_is_refused_by_an_image_registry(artist: Client, roots: Path):
    error = await artist.refused("text", write_adapter(roots / "text"))
    assert "an adapter of a language model, but the base model here makes images" in error.message and error.param
    part = {
        f"base_model.model.{key.removeprefix('unet.')}": tensor for key, tensor in as_peft(random_pairs(attention())).items()
    }
    error = await artist.refused("part", write(roots / "part.safetensors", safetensors_bytes(part)))
    assert "its name lacks the part (unet., text_encoder.)" in error.message


async def test_an_image_adapter_is_refused_by_a_text_registry(client: Client, roots: Path):
    file = write(roots / "style.safetensors", lora())
    uploads = await client.bus.object_store(subjects.UPLOADS)
    await uploads.put("style", file.read_bytes())
    for location, kind in ((file, "path"), ("style", "upload")):
        error = await client.refused("style", location, kind=kind)
        assert isinstance(error, BadRequest) and error.param == "location"
        assert "as image adapters are; the base model here makes text" in error.message
    write(roots / "folder" / LORA_FILE, lora())
    error = await client.refused("style", "folder")
    assert f"holds no adapter_model.safetensors but {LORA_FILE}; an image adapter?" in error.message
    for number, tensors in enumerate((as_peft(random_pairs(attention())), as_kohya(random_pairs(attention()), {}))):
        error = await client.refused("style", write_adapter(roots / f"peft{number}", tensors=tensors))
        assert "an adapter of an image model, but the base model here makes text" in error.message
