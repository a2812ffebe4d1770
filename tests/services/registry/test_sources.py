"""Promise: nothing outside the allowed roots is looked at, archives cannot write, grow or point anywhere."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from services.registry.archives import CONFIG, MAX_OTHER_BYTES, WEIGHTS, PeftFiles, read_archive
from services.registry.sources import open_hub, open_path
from shared.errors import BadRequest, InvalidAdapter, MotetError, TooLarge, Unavailable
from tests.support_adapters import peft_config, random_tensors, safetensors_bytes, write_adapter

MAX = 1 << 20
CONFIG_JSON, WEIGHT_BYTES = peft_config(), safetensors_bytes(random_tensors())
GOOD = {CONFIG: CONFIG_JSON, WEIGHTS: WEIGHT_BYTES}


def zip_of(members: dict[str, bytes], change: Callable[[zipfile.ZipInfo], None] = lambda info: None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            change(info)
            archive.writestr(info, data)
    return out.getvalue()


def tar_of(members: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda info: None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            change(info)
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out.getvalue()


def unpack(data: bytes, max_bytes: int = MAX) -> PeftFiles:
    return read_archive(io.BytesIO(data), len(data), max_bytes, "upload:test")


# ---- paths


def test_a_directory_below_a_root_is_opened_by_absolute_and_by_relative_path(tmp_path: Path):
    adapter = write_adapter(tmp_path / "roots" / "a" / "mine")
    roots = [os.path.realpath(tmp_path / "roots")]
    for location in (str(adapter), "a/mine", "a/../a/mine", str(tmp_path / "roots" / "." / "a" / "mine")):
        with open_path(location, roots, MAX) as files:
            assert files.config_json == (adapter / CONFIG).read_bytes()
            assert files.weights.read() == (adapter / WEIGHTS).read_bytes()
            assert files.source == f"path:{roots[0]}/a/mine"


@pytest.mark.parametrize(
    "location", ["../secret", "a/../../secret", "/etc", "{outside}", "{roots}/../secret", "link", "{roots}x"]
)
def test_a_path_that_leaves_the_roots_is_refused_whether_or_not_it_exists(tmp_path: Path, location: str):
    roots = tmp_path / "roots"
    roots.mkdir()
    outside = write_adapter(tmp_path / "secret")
    write_adapter(tmp_path / "rootsx")  # shares the root's name as a prefix
    (roots / "link").symlink_to(outside)
    with pytest.raises(InvalidAdapter, match="outside the allowed roots") as refused:
        open_path(location.format(outside=outside, roots=roots), [os.path.realpath(roots)], MAX)
    assert refused.value.param == "location" and "such file" not in refused.value.message


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_file_that_is_a_link_to_outside_is_refused(tmp_path: Path, name: str):
    adapter = write_adapter(tmp_path / "roots" / "mine")
    secret = write_adapter(tmp_path / "secret") / name
    (adapter / name).unlink()
    (adapter / name).symlink_to(secret)
    with pytest.raises(InvalidAdapter, match=f"{name} is a link to outside"):
        open_path("mine", [os.path.realpath(tmp_path / "roots")], MAX)


def test_a_link_within_the_roots_is_followed(tmp_path: Path):
    adapter = write_adapter(tmp_path / "mine")
    (tmp_path / "other").symlink_to(adapter)
    with open_path("other", [os.path.realpath(tmp_path)], MAX) as files:
        assert files.source.endswith("/mine")


def test_without_roots_there_are_no_paths(tmp_path: Path):
    with pytest.raises(InvalidAdapter, match="no allowed roots"):
        open_path(str(write_adapter(tmp_path / "a")), [], MAX)


def test_what_is_no_adapter_directory_is_refused_with_what_is_missing(tmp_path: Path):
    roots = [os.path.realpath(tmp_path)]
    (tmp_path / "empty").mkdir()
    weights_only = write_adapter(tmp_path / "weights")
    (weights_only / CONFIG).unlink()
    pipe = write_adapter(tmp_path / "pipe")
    (pipe / WEIGHTS).unlink()
    os.mkfifo(pipe / WEIGHTS)  # opening it for reading would wait for ever
    folder = write_adapter(tmp_path / "folder")
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()
    for location, reason in (
        ("empty", f"holds no {WEIGHTS}"),
        ("weights", f"holds no {CONFIG}"),
        ("pipe", "not a plain file"),
        ("folder", "not a plain file"),
        ("nothing", "No such file"),
        ("zero\0byte", "zero byte"),
        ("", "empty"),
        ("x" * 5000, "File name too long"),
    ):
        with pytest.raises(InvalidAdapter, match=reason):
            open_path(location, roots, MAX)


def test_pickle_files_are_never_opened(tmp_path: Path):
    roots = [os.path.realpath(tmp_path)]
    old = write_adapter(tmp_path / "old")
    (old / WEIGHTS).rename(old / "adapter_model.bin")
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.bin .* pickle files can run code and are never opened"):
        open_path("old", roots, MAX)
    with pytest.raises(InvalidAdapter, match="pickle file"):
        open_path("old/adapter_model.bin", roots, MAX)
    for pack in (zip_of, tar_of):
        with pytest.raises(InvalidAdapter, match="pickle files"):
            unpack(pack({CONFIG: CONFIG_JSON, "adapter_model.bin": b"x"}))
    mixed = write_adapter(tmp_path / "mixed")
    (mixed / "training_args.bin").write_bytes(b"\x80\x04.")
    open_path("mixed", roots, MAX).weights.close()  # a pickle that nobody needs is left alone


def test_a_weights_file_over_the_limit_is_refused(tmp_path: Path):
    write_adapter(tmp_path / "big")
    with pytest.raises(TooLarge, match="the limit is 1000"):
        open_path("big", [os.path.realpath(tmp_path)], 1000)


# ---- archives


@pytest.mark.parametrize("folder", ["", "my-adapter/", "./"])
def test_zip_tar_and_gzipped_tar_give_the_same_files(tmp_path: Path, folder: str):
    members = {folder + "README.md": b"hello"} | {folder + name: data for name, data in GOOD.items()}
    for number, data in enumerate((zip_of(members), tar_of(members), gzip.compress(tar_of(members)))):
        with unpack(data) as files:
            assert (files.config_json, files.weights.read(), files.size_bytes) == (CONFIG_JSON, WEIGHT_BYTES, len(WEIGHT_BYTES))
        path = tmp_path / f"archive{number}"
        path.write_bytes(data)
        with open_path(str(path), [os.path.realpath(tmp_path)], MAX) as files:
            assert files.weights.read() == WEIGHT_BYTES


@pytest.mark.parametrize("pack", [zip_of, tar_of])
@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "..\\evil", "C:/evil"])
def test_a_member_that_points_outside_is_refused(pack: Callable[[dict[str, bytes]], bytes], name: str):
    with pytest.raises(InvalidAdapter, match="points outside the archive"):
        unpack(pack(GOOD | {name: b"x"}))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(kind: bytes):
    def change(info: tarfile.TarInfo) -> None:
        if info.name == "odd":
            info.type, info.linkname, info.size = kind, "/etc/passwd", 0

    with pytest.raises(InvalidAdapter, match="'odd' is not a plain file"):
        unpack(tar_of(GOOD | {"odd": b""}, change))


def test_links_and_encrypted_members_in_a_zip_are_refused():
    def link(info: zipfile.ZipInfo) -> None:
        if info.filename == WEIGHTS:
            info.external_attr = 0o120777 << 16

    with pytest.raises(InvalidAdapter, match=f"'{WEIGHTS}' is not a plain file"):
        unpack(zip_of(GOOD, link))
    data = bytearray(zip_of(GOOD))
    data[data.index(b"PK\1\2") + 8] |= 1  # the first member's flag: encrypted
    with pytest.raises(InvalidAdapter, match="not a plain file"):
        unpack(bytes(data))


def test_bombs_are_refused_before_they_are_inflated():
    zeros = bytes(64 << 20)
    for data in (
        zip_of({CONFIG: CONFIG_JSON, WEIGHTS: zeros}),
        gzip.compress(tar_of({CONFIG: CONFIG_JSON, WEIGHTS: zeros})),
        zip_of({CONFIG: zeros, WEIGHTS: WEIGHT_BYTES}),
    ):
        with pytest.raises(TooLarge):
            unpack(data)
    beside = gzip.compress(tar_of({"other": bytes(MAX_OTHER_BYTES + MAX)} | GOOD), compresslevel=1)
    assert len(beside) < MAX
    with pytest.raises(TooLarge, match="inflates"):
        unpack(beside)


def test_a_zip_that_lies_about_a_size_is_refused():
    data = bytearray(zip_of({CONFIG: CONFIG_JSON, WEIGHTS: bytes(4 << 20)}))
    for signature, offset in ((b"PK\1\2", 24), (b"PK\3\4", 22)):
        at = data.rindex(signature)
        data[at + offset : at + offset + 4] = struct.pack("<I", 1000)
    with pytest.raises(MotetError) as refused:
        unpack(bytes(data))
    assert refused.value.status in (400, 413)


def test_too_many_members_are_refused():
    crowd = {f"f{n}": b"" for n in range(1001)}
    for data in (zip_of(crowd), tar_of(crowd), gzip.compress(tar_of(crowd))):
        with pytest.raises(InvalidAdapter, match="more than 1000 members"):
            unpack(data)


def test_a_zip_directory_too_large_for_memory_is_refused_before_it_is_read():
    data = bytearray(zip_of(GOOD))
    at = data.rindex(b"PK\5\6")
    data[at + 12 : at + 16] = struct.pack("<I", 1 << 30)
    with pytest.raises(InvalidAdapter, match="zip64"):
        unpack(bytes(data))
    zip64 = zip_of(GOOD)
    end = zip64.rindex(b"PK\5\6")
    with pytest.raises(InvalidAdapter, match="zip64"):
        unpack(zip64[:end] + struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1) + zip64[end:])


def test_ambiguous_archives_are_refused():
    with pytest.raises(InvalidAdapter, match=f"more than one {WEIGHTS}"):
        unpack(tar_of(GOOD | {"b/" + WEIGHTS: WEIGHT_BYTES}))
    with pytest.raises(InvalidAdapter, match="different directories"):
        unpack(zip_of({"a/" + CONFIG: CONFIG_JSON, "b/" + WEIGHTS: WEIGHT_BYTES}))
    with pytest.raises(InvalidAdapter, match=f"holds no {CONFIG}"):
        unpack(zip_of({WEIGHTS: WEIGHT_BYTES}))
    with pytest.raises(InvalidAdapter, match=f"holds no {WEIGHTS}"):
        unpack(tar_of({CONFIG: CONFIG_JSON}))


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\3\4", b"\x1f\x8b\x08", bytes(4096), os.urandom(4096)], ids=range(6))
def test_what_is_no_archive_is_refused(data: bytes):
    with pytest.raises(InvalidAdapter):
        unpack(data)


def test_every_truncation_of_an_archive_is_refused():
    for good in (zip_of(GOOD), tar_of(GOOD)[:20_000], gzip.compress(tar_of(GOOD))):
        for size in range(0, len(good), max(1, len(good) // 40)):
            try:
                unpack(good[:size]).weights.close()
            except MotetError:
                continue
            assert good[:2] not in (b"PK", b"\x1f\x8b")  # a tar is complete before its padding ends


# ---- hub


@pytest.mark.parametrize("location", ["noslash", "../etc/passwd", "a/b/c", "/abs/path", "https://host/a/b", "a/b@"])
def test_what_is_no_hub_id_is_refused_without_asking_the_hub(location: str):
    with pytest.raises(BadRequest, match="not a hub id"):
        open_hub(location, MAX)


def test_an_unreachable_hub_is_unavailable_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match=r"cannot get some/adapter from the Hugging Face hub.*register it from a path"):
        open_hub("some/adapter", MAX)


HUB_CLIENT = """
import sys
from services.registry.sources import open_hub
from shared.errors import MotetError
try:
    with open_hub(sys.argv[1], int(sys.argv[2])) as files:
        print(files.size_bytes, len(files.weights.read()), files.source)
except MotetError as error:
    print(type(error).__name__, error.message)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a download needs: model info and two files of `some/adapter`."""

    protocol_version = "HTTP/1.1"
    sha = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        name = path.rsplit("/", 1)[-1]
        if path.startswith("/api/models/some/adapter"):
            files = [{"rfilename": n, "size": len(d)} for n, d in GOOD.items()]
            self.reply(200, json.dumps({"id": "some/adapter", "sha": self.sha, "siblings": files}).encode(), body)
        elif path.startswith(f"/some/adapter/resolve/{self.sha}/") and name in GOOD:
            self.reply(200, GOOD[name], body)
        else:
            self.reply(404, b'{"error": "Repository not found"}', body, {"X-Error-Code": "RepoNotFound"})

    def reply(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"X-Repo-Commit": self.sha, "ETag": f'"{len(data)}"', **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_an_adapter_on_the_hub_is_fetched_pinned_to_its_commit_and_checked_before_the_download(tmp_path: Path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "0",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }

        def fetch(location: str, max_bytes: int) -> str:
            command = [sys.executable, "-c", HUB_CLIENT, location, str(max_bytes)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
            return done.stdout.strip()

        size = len(WEIGHT_BYTES)
        assert fetch("some/adapter", MAX) == f"{size} {size} hub:some/adapter@{Hub.sha}"
        assert fetch("some/adapter", size - 1).startswith("TooLarge some/adapter on the hub")
        assert fetch("nobody/nothing", MAX).startswith("InvalidAdapter the hub has no nobody/nothing")
        server.shutdown()
