"""Promise: nothing outside the allowed roots is read; archives cannot write, inflate without limit or point elsewhere."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.services.registry import archives
from motet.services.registry.archives import read_archive
from motet.services.registry.files import CONFIG, WEIGHTS, PeftFiles
from motet.services.registry.paths import open_path
from motet.services.registry.unpack import MAX_OTHER_BYTES
from motet.services.registry.unpack import unpack as unpack_here
from motet.shared.errors import InvalidAdapter, MotetError, TooLarge
from tests.support_adapters import peft_config, random_tensors, safetensors_bytes, write_adapter
from tests.support_malformed import extended_tar, many_global_headers, pax_record, tar_of, zip_of

MAX = 1 << 20
CONFIG_JSON, WEIGHT_BYTES = peft_config(), safetensors_bytes(random_tensors())
GOOD = {CONFIG: CONFIG_JSON, WEIGHTS: WEIGHT_BYTES}


def unpack(data: bytes, max_bytes: int = MAX) -> PeftFiles:
    """What the registry does with an archive: a child process reads it."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return read_archive(file, len(data), max_bytes, "upload:test")


# ---- paths


def test_a_directory_below_a_root_is_opened_by_absolute_and_by_relative_path(tmp_path: Path):
    adapter = write_adapter(tmp_path / "roots" / "a" / "mine")
    roots = [os.path.realpath(tmp_path / "roots")]
    for location in (str(adapter), "a/mine", "a/../a/mine", str(tmp_path / "roots" / "." / "a" / "mine")):
        with open_path(location, roots, MAX) as files:
            assert files.config_json == (adapter / CONFIG).read_bytes()
            assert files.weights.read() == (adapter / WEIGHTS).read_bytes()
            assert files.source == "path:a/mine"


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
        assert files.source == "path:mine"


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
    open_path("mixed", roots, MAX).weights.close()  # a pickle that is not needed is ignored


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
                unpack_here(io.BytesIO(good[:size]), io.BytesIO(), io.BytesIO(), MAX)
            except MotetError:
                continue
            assert good[:2] not in (b"PK", b"\x1f\x8b")  # a tar is complete before its padding ends


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_compressed_with_anything_but_deflate_is_refused_before_it_is_inflated(method: int):
    """The whole bomb has some hundred bytes; its decompressor alone would take more than a gigabyte."""

    def change(info: zipfile.ZipInfo) -> None:
        info.compress_type = method

    data = zip_of({CONFIG: CONFIG_JSON, WEIGHTS: bytes(4 << 20)}, change)
    with pytest.raises(InvalidAdapter, match=f"compressed with zip method {method}: only stored and deflated"):
        unpack(data)


@pytest.mark.parametrize(
    "kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE]
)
def test_a_tar_header_too_large_for_a_name_is_refused_before_it_is_read(kind: bytes):
    with pytest.raises(InvalidAdapter, match="header of 4194304 bytes, the limit is 65536"):
        unpack(extended_tar(kind, bytes(4 << 20), tar_of(GOOD)))
    if kind in (tarfile.XHDTYPE, tarfile.XGLTYPE):
        with unpack(extended_tar(kind, pax_record("comment", "x" * 20_000), tar_of(GOOD))) as files:
            assert files.weights.read() == WEIGHT_BYTES


def test_names_of_any_length_that_tar_programs_write_are_read():
    folder = "checkpoints/" + "long-" * 40 + "/"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as archive:
            for name, data in GOOD.items():
                info = tarfile.TarInfo(folder + name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        with unpack(out.getvalue()) as files:
            assert files.weights.read() == WEIGHT_BYTES


def test_an_archive_that_needs_more_memory_or_time_than_allowed_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidAdapter, match=r"more (time or )?memory .*than is allowed"):
        unpack(many_global_headers(tar_of(GOOD)))
    monkeypatch.setattr(archives, "CPU_BASE_S", 0)
    monkeypatch.setattr(archives, "CPU_BYTES_PER_S", 1 << 40)
    with pytest.raises(InvalidAdapter, match="more time"):
        unpack(zip_of(GOOD))


def test_a_child_that_fails_is_a_server_error_and_reveals_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archives, "CHILD", "raise SystemExit('/srv/secret/place is gone')")
    with pytest.raises(MotetError) as failed:
        unpack(zip_of(GOOD))
    assert failed.value.status == 500 and "/srv" not in failed.value.message


def test_a_bzipped_tar_is_no_archive_we_read():
    with pytest.raises(InvalidAdapter, match="not a readable zip or tar"):
        unpack(bz2.compress(tar_of(GOOD)))


def test_long_names_are_shortened_and_unprintable_ones_made_harmless_in_refusals():
    long = "x" * 9000
    with pytest.raises(InvalidAdapter, match="points outside the archive") as refused:
        unpack(zip_of(GOOD | {f"../{long}": b""}))
    assert len(refused.value.message) < 300
    with pytest.raises(InvalidAdapter, match="points outside the archive") as refused:
        unpack(tar_of(GOOD | {"../\x1b[2J\n": b""}))
    assert refused.value.message.isprintable()


# ---- what is told of this machine


def test_a_relative_path_is_looked_up_where_the_registry_was_started_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    roots = [os.path.realpath(tmp_path / "project" / "adapters")]
    write_adapter(tmp_path / "project" / "adapters" / "mine")
    monkeypatch.chdir(tmp_path / "project")
    for location in ("adapters/mine", "./adapters/mine", "mine"):
        with open_path(location, roots, MAX) as files:
            assert files.source == "path:mine"
    with pytest.raises(InvalidAdapter, match=r"No such file"):
        open_path("other/mine", roots, MAX)


def test_refusals_and_sources_show_what_the_client_sent_and_never_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    roots = tmp_path / "secret-place" / "adapters"
    real = [os.path.realpath(roots)]
    write_adapter(roots / "mine")
    (roots / "empty").mkdir()
    (roots / "closed").mkdir(mode=0o000)
    (roots / "archive.tar").write_bytes(b"no archive")
    with open_path("mine", real, MAX) as files:
        assert "secret-place" not in files.source
    for location in ("nothing", "../outside", "empty", "closed", "archive.tar", "mine/adapter_model.safetensors", "x" * 5000):
        try:
            open_path(location, real, MAX)
        except MotetError as error:
            assert "secret-place" not in error.message and len(error.message) < 500, location
    (roots / "closed").chmod(0o700)
