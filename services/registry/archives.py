"""Two files out of a stranger's archive: `adapter_config.json` and `adapter_model.safetensors`, and nothing else.

Accepted are zip and tar, the latter also gzipped. Nothing is unpacked to a path that the archive chose: members are only
ever read, into anonymous temporary files. Limits, all checked before the bytes they are about are read or inflated:

    members          MAX_MEMBERS, and a zip directory of at most MAX_DIRECTORY_BYTES
    inflated bytes   max_bytes for the weights, max_bytes + MAX_OTHER_BYTES for a whole tar
    names            relative, without `..`; no links, devices, sparse or encrypted members anywhere in the archive
"""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import PurePosixPath
from typing import IO, BinaryIO, cast

import msgspec

from services.registry.peft import MAX_CONFIG_BYTES
from shared.errors import InvalidAdapter, TooLarge

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
MAX_MEMBERS = 1000
MAX_DIRECTORY_BYTES = 1024 * 1024
MAX_OTHER_BYTES = 64 * 1024 * 1024
_COPY_BYTES = 1024 * 1024
_END_BYTES = 22  # of a zip's end-of-directory record
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile, NotImplementedError, RuntimeError)


class PeftFiles(msgspec.Struct):
    """An adapter's two files, wherever they came from. Close it when done."""

    config_json: bytes
    weights: BinaryIO
    size_bytes: int  # of the weights
    source: str  # where they came from, for people

    def __enter__(self) -> PeftFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.weights.close()


def missing_weights(place: str, names: set[str]) -> InvalidAdapter:
    """The refusal when `place` holds the files `names` but no safetensors weights."""
    pickles = sorted(name for name in names if name.startswith("adapter_model") and name.endswith(PICKLES))
    if pickles:
        return InvalidAdapter(
            f"{place} holds {pickles[0]} but no {WEIGHTS}: pickle files can run code and are never opened; "
            "save the adapter with safe_serialization=True"
        )
    return InvalidAdapter(f"{place} holds no {WEIGHTS}")


class _Metered(io.RawIOBase):
    """Reads from `inner` until `left` bytes were asked for."""

    def __init__(self, inner: IO[bytes], left: int) -> None:
        self._inner, self._left = inner, left

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > self._left:
            raise TooLarge("the archive inflates to more than the size limit")
        data = self._inner.read(size)
        self._left -= len(data)
        return data


class _Picker:
    """Sees every member's name, keeps the two that matter, refuses two of a kind."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._members = 0
        self.names: set[str] = set()
        self.config: tuple[str, bytes] | None = None
        self.weights: tuple[str, BinaryIO, int] | None = None

    def see(self, name: str, *, plain: bool, is_dir: bool, size: int, read: Callable[[], IO[bytes] | None]) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise InvalidAdapter(f"the archive has more than {MAX_MEMBERS} members")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
            raise InvalidAdapter(f"archive member {name!r} points outside the archive")
        if is_dir:
            return
        if not plain:
            raise InvalidAdapter(f"archive member {name!r} is not a plain file")
        self.names.add(path.name)
        if path.name not in (CONFIG, WEIGHTS):
            return
        if (self.config if path.name == CONFIG else self.weights) is not None:
            raise InvalidAdapter(f"the archive holds more than one {path.name}")
        limit = MAX_CONFIG_BYTES if path.name == CONFIG else self._max_bytes
        if size > limit:
            raise TooLarge(f"archive member {name!r} has {size} bytes, the limit is {limit}")
        with ExitStack() as stack:
            inner = read()
            if inner is None:
                raise InvalidAdapter(f"archive member {name!r} is not a plain file")
            stack.enter_context(inner)
            out = stack.enter_context(tempfile.TemporaryFile())
            copied = _copy(inner, out, limit, name)
            out.seek(0)
            if path.name == CONFIG:
                self.config = (str(path.parent), out.read())
            else:
                self.weights = (str(path.parent), out, copied)
                stack.pop_all()
                inner.close()

    def result(self, source: str) -> PeftFiles:
        if self.weights is None:
            raise missing_weights("the archive", self.names)
        if self.config is None:
            raise InvalidAdapter(f"the archive holds no {CONFIG}")
        if self.config[0] != self.weights[0]:
            raise InvalidAdapter(f"{CONFIG} and {WEIGHTS} lie in different directories of the archive")
        return PeftFiles(config_json=self.config[1], weights=self.weights[1], size_bytes=self.weights[2], source=source)

    def close(self) -> None:
        if self.weights is not None:
            self.weights[1].close()


def _copy(inner: IO[bytes], out: IO[bytes], limit: int, name: str) -> int:
    copied = 0
    while chunk := inner.read(_COPY_BYTES):
        copied += len(chunk)
        if copied > limit:
            raise TooLarge(f"archive member {name!r} inflates to more than {limit} bytes")
        out.write(chunk)
    return copied


def read_archive(file: BinaryIO, size_bytes: int, max_bytes: int, source: str) -> PeftFiles:
    """The adapter in a seekable archive of `size_bytes`. Blocks: call it in a thread.

    Raises InvalidAdapter or TooLarge with the reason; whatever the archive holds, at most `max_bytes` plus a few
    megabytes are written to temporary files.
    """
    if size_bytes > max_bytes + MAX_OTHER_BYTES:
        raise TooLarge(f"the archive has {size_bytes} bytes, the limit is {max_bytes + MAX_OTHER_BYTES}")
    magic = file.read(4)
    file.seek(0)
    picker = _Picker(max_bytes)
    try:
        if magic[:2] == b"PK":
            _read_zip(file, size_bytes, picker)
        elif magic[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=file) as inflated:
                _read_tar(cast("IO[bytes]", inflated), max_bytes, picker)
        else:
            _read_tar(file, max_bytes, picker)
        return picker.result(source)
    except _BROKEN as error:
        picker.close()
        raise InvalidAdapter(f"not a readable zip or tar archive: {error}") from None
    except BaseException:
        picker.close()
        raise


def _read_tar(file: IO[bytes], max_bytes: int, picker: _Picker) -> None:
    metered = _Metered(file, max_bytes + MAX_OTHER_BYTES)
    with tarfile.open(fileobj=metered, mode="r|") as tar:
        for member in tar:
            plain = member.isreg() and not member.issparse()
            picker.see(
                member.name,
                plain=plain,
                is_dir=member.isdir(),
                size=member.size,
                read=lambda member=member: tar.extractfile(member),  # type: ignore[misc]
            )


def _read_zip(file: BinaryIO, size_bytes: int, picker: _Picker) -> None:
    _check_zip_directory(file, size_bytes)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            mode = info.external_attr >> 16
            plain = not info.flag_bits & 0x1 and (stat.S_IFMT(mode) in (0, stat.S_IFREG))
            picker.see(
                info.filename,
                plain=plain,
                is_dir=info.is_dir(),
                size=info.file_size,
                read=lambda info=info: archive.open(info),  # type: ignore[misc]
            )


def _check_zip_directory(file: BinaryIO, size_bytes: int) -> None:
    """Refuse a directory that would not fit in memory before `zipfile` reads it whole.

    Looks where `zipfile` looks: for a record without comment at the very end, else for the last one in the final 64 KiB.
    """
    tail_bytes = min(size_bytes, _END_BYTES + 65_535)
    file.seek(size_bytes - tail_bytes)
    tail = file.read(tail_bytes)
    file.seek(0)
    at = len(tail) - _END_BYTES
    if not (at >= 0 and tail[at : at + 4] == b"PK\5\6" and tail[-2:] == b"\0\0"):
        at = tail.rfind(b"PK\5\6")
    record = tail[at : at + _END_BYTES]
    if at < 0 or len(record) < _END_BYTES:
        raise InvalidAdapter("not a readable zip or tar archive: no end-of-directory record")
    members, directory_bytes = int.from_bytes(record[10:12], "little"), int.from_bytes(record[12:16], "little")
    locator = tail[max(0, at - 20) : at]
    if locator[:4] == b"PK\6\7" or members > MAX_MEMBERS or directory_bytes > MAX_DIRECTORY_BYTES:
        raise InvalidAdapter(f"the archive has more than {MAX_MEMBERS} members, or is a zip64 archive")
