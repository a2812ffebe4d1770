"""The child process that extracts an adapter's files (`files.Layout`) from an untrusted archive.

Started by `archives.read_archive` with four open files and its limits; it answers with one JSON object on stdout:

    {"size_bytes": 1234}                                   the files are written
    {"code": "invalid_adapter", "message": "..."}          the refusal, as `shared.errors.ErrorInfo`

The limits of this process bound what a decompressor or parser can be made to use. Nothing is unpacked to a path from the
archive. These are checked before the bytes in question are read or inflated:

    members          MAX_MEMBERS, and a zip directory of at most MAX_DIRECTORY_BYTES
    compression      zip members are stored or deflated, a tar is plain or gzipped; nothing else
    tar headers      long names and PAX headers of at most MAX_TAR_HEADER_BYTES, no sparse files
    chats            the small files for chats: MAX_TEXTS of MAX_TEXTS_BYTES together
    inflated bytes   max_bytes for the weights, max_bytes + MAX_OTHER_BYTES for a whole tar
    names            relative, without `..`; no links, devices or encrypted members anywhere in the archive
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import resource
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import IO, BinaryIO, cast

import msgspec

from motet.services.registry.files import (
    IMAGE,
    LAYOUTS,
    LIMIT_OPTION,
    LORA_FILE,
    MAX_CONFIG_BYTES,
    PEFT,
    WEIGHTS,
    Layout,
    Texts,
    is_lora_file,
    quoted,
    shown,
    too_large,
)
from motet.shared.errors import InvalidAdapter, MotetError, TooLarge, Unavailable
from motet.shared.text_files import is_text_file

MAX_MEMBERS = 1000
MAX_DIRECTORY_BYTES = 1024 * 1024
MAX_TAR_HEADER_BYTES = 64 * 1024
MAX_OTHER_BYTES = 64 * 1024 * 1024
_COPY_BYTES = 1024 * 1024
_END_BYTES = 22  # of a zip's end-of-directory record
_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of what can fail with an error number, not the archive's fault


class UnpackLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the child. `max_bytes` applies to the weights."""

    max_bytes: int
    memory_bytes: int
    cpu_s: int
    chat: bool = True  # also the files for chats
    layout: str = PEFT.name


class Done(msgspec.Struct, frozen=True):
    """The files are written; `size_bytes` is the size of the weights."""

    size_bytes: int


class _Metered(io.RawIOBase):
    """Reads from `inner` until `left` bytes were asked for."""

    def __init__(self, inner: IO[bytes], left: int) -> None:
        self._inner, self._left = inner, left

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > self._left:
            raise TooLarge(f"the archive inflates to more than the size limit ({LIMIT_OPTION})")
        data = self._inner.read(size)
        self._left -= len(data)
        return data


class _Picker:
    """Checks every member's name, copies the adapter's files, and refuses duplicates."""

    def __init__(self, config: BinaryIO, weights: BinaryIO, max_bytes: int, chat: bool, layout: Layout) -> None:
        self._chat, self._texts, self._layout = chat, Texts(), layout
        self._weights, self._max_bytes = weights, max_bytes
        self._sinks = {layout.configuration: (config, MAX_CONFIG_BYTES), WEIGHTS: (weights, max_bytes)}
        self._members = 0
        self._names: set[str] = set()
        self._found: dict[str, tuple[PurePosixPath, int]] = {}  # file -> (directory, bytes)

    def see(self, name: str, *, plain: bool, is_dir: bool, size: int, read: Callable[[], IO[bytes] | None]) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise InvalidAdapter(f"the archive has more than {MAX_MEMBERS} members")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
            raise InvalidAdapter(f"archive member {quoted(name)} points outside the archive")
        if is_dir:
            return
        if not plain:
            raise InvalidAdapter(f"archive member {quoted(name)} is not a plain file")
        self._names.add(path.name)
        if self._chat and _chat_name(path):
            self._keep_text(str(path), read())
            return
        if (wanted := self._sink(path)) is None:
            return
        sink, limit = wanted
        if size > limit:
            raise too_large(f"archive member {quoted(name)}", size, limit)
        inner = read()
        if inner is None:
            raise InvalidAdapter(f"archive member {quoted(name)} is not a plain file")
        with inner:
            self._found[path.name] = (path.parent, _copy(inner, sink, limit, name))

    def _sink(self, path: PurePosixPath) -> tuple[BinaryIO, int] | None:
        """Where the member is written, and the bytes that it may have; None for one that is not needed."""
        if path.name not in self._sinks:
            return None
        if path.name in self._found:
            raise InvalidAdapter(f"the archive holds more than one {path.name}")
        return self._sinks[path.name]

    def _keep_text(self, name: str, inner: IO[bytes] | None) -> None:
        limit = self._texts.limit(name)
        with inner or io.BytesIO() as data:
            self._texts.add(name, data.read(limit + 1))

    def texts(self) -> dict[str, bytes]:
        """The files for chats beside the configuration."""
        beside = self._found[self._layout.configuration][0]
        found = {PurePosixPath(name): data for name, data in self._texts.found.items()}
        inside = {str(path.relative_to(beside)): data for path, data in found.items() if path.is_relative_to(beside)}
        return {name: data for name, data in inside.items() if is_text_file(name)}

    def result(self) -> Done:
        config = self._layout.configuration
        (place, size_bytes), (beside, _) = self._found[self._layout.weights("the archive", self._names)], self._found[config]
        if beside != place:
            raise InvalidAdapter(f"{config} and {WEIGHTS} lie in different directories of the archive")
        return Done(size_bytes)


class _LoraPicker(_Picker):
    """Copies the one LoRA file of an image adapter.

    The archive is read once and forwards, so the first one is copied before it is known whether it is the only one.
    """

    def _sink(self, path: PurePosixPath) -> tuple[BinaryIO, int] | None:
        if not is_lora_file(path.name):
            return None
        if path.name in self._found:
            raise InvalidAdapter(f"the archive holds more than one {path.name}")
        if self._found and path.name != LORA_FILE:
            return None
        self._weights.seek(0)
        self._weights.truncate()
        return self._weights, self._max_bytes

    def result(self) -> Done:
        return Done(self._found[self._layout.weights("the archive", self._names)][1])


def _copy(inner: IO[bytes], out: IO[bytes], limit: int, name: str) -> int:
    copied = 0
    while chunk := inner.read(_COPY_BYTES):
        copied += len(chunk)
        if copied > limit:
            raise TooLarge(f"archive member {quoted(name)} inflates to more than {limit} bytes")
        out.write(chunk)
    out.flush()
    return copied


def _chat_name(path: PurePosixPath) -> bool:
    """Whether the end of the path is that of a file for chats."""
    return is_text_file(path.name) or is_text_file("/".join(path.parts[-2:]))


def unpack(
    archive: BinaryIO,
    config: BinaryIO,
    weights: BinaryIO,
    max_bytes: int,
    texts: BinaryIO | None = None,
    layout: Layout = PEFT,
) -> Done:
    """Write the adapter's files in the seekable `archive`, and to `texts` those for chats: msgpack, {path: content}.

    Raises InvalidAdapter or TooLarge with the reason, or OSError.
    """
    size_bytes = archive.seek(0, io.SEEK_END)
    archive.seek(0)
    magic = archive.read(4)
    archive.seek(0)
    picker = (_LoraPicker if layout is IMAGE else _Picker)(config, weights, max_bytes, texts is not None, layout)
    try:
        if magic[:2] == b"PK":
            _read_zip(archive, size_bytes, picker)
        elif magic[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=archive) as inflated:
                _read_tar(cast("IO[bytes]", inflated), max_bytes, picker)
        else:
            _read_tar(archive, max_bytes, picker)
    except (MotetError, MemoryError):
        raise
    except Exception as error:  # whatever the parsers make of a stranger's bytes
        if isinstance(error, OSError) and error.errno in _OURS:
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise InvalidAdapter(f"not a readable zip or tar archive: {shown(reason)}") from None
    done = picker.result()
    if texts is not None:
        texts.write(msgspec.msgpack.encode(picker.texts()))
        texts.flush()
    return done


# ---- tar


class _TarMember(tarfile.TarInfo):
    """A tar header that is checked before a long name, PAX headers or a sparse map are read into memory."""

    _EXTENDED = (
        tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
    )  # fmt: skip

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:  # tarfile's own hook for subclasses
        if self.type in self._EXTENDED and self.size > MAX_TAR_HEADER_BYTES:
            raise InvalidAdapter(f"the archive has a header of {self.size} bytes, the limit is {MAX_TAR_HEADER_BYTES}")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise InvalidAdapter(f"archive member {quoted(self.name)} is not a plain file: it is sparse")
        return cast("tarfile.TarInfo", super()._proc_member(archive))  # type: ignore[misc]

    def _proc_gnusparse_01(self, *_: object) -> None:
        raise InvalidAdapter("the archive has a sparse file, which is not a plain file")

    _proc_gnusparse_00 = _proc_gnusparse_10 = _proc_gnusparse_01


def _read_tar(file: IO[bytes], max_bytes: int, picker: _Picker) -> None:
    metered = _Metered(file, max_bytes + MAX_OTHER_BYTES)
    with tarfile.open(fileobj=metered, mode="r|", tarinfo=_TarMember) as tar:
        for member in tar:
            picker.see(
                member.name,
                plain=member.isreg(),
                is_dir=member.isdir(),
                size=member.size,
                read=lambda member=member: tar.extractfile(member),  # type: ignore[misc]
            )


# ---- zip


def _read_zip(file: BinaryIO, size_bytes: int, picker: _Picker) -> None:
    _check_zip_directory(file, size_bytes)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            mode = info.external_attr >> 16
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise InvalidAdapter(
                    f"archive member {quoted(info.filename)} is compressed with zip method {info.compress_type}: "
                    "only stored and deflated members are read"
                )
            plain = not info.flag_bits & 0x1 and (stat.S_IFMT(mode) in (0, stat.S_IFREG))
            picker.see(
                info.filename,
                plain=plain,
                is_dir=info.is_dir(),
                size=info.file_size,
                read=lambda info=info: archive.open(info),  # type: ignore[misc]
            )


def _check_zip_directory(file: BinaryIO, size_bytes: int) -> None:
    """Refuse a zip directory that is too large, before `zipfile` reads it.

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


# ---- the process


def _confine(limits: UnpackLimits) -> None:
    """Apply the limits to this process; the file size applies to each of the files."""
    written = max(limits.max_bytes, MAX_CONFIG_BYTES) + _COPY_BYTES
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_FSIZE, written),
    ):
        _, most = resource.getrlimit(kind)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (limit, limit))


def main(limits_json: str, archive: int, config: int, weights: int, texts: int) -> None:
    """Run the child process: unpack and write the answer to stdout. It inherits the file descriptors."""
    limits = msgspec.json.decode(limits_json, type=UnpackLimits)
    _confine(limits)
    answer: msgspec.Struct
    try:
        with (
            os.fdopen(archive, "rb") as source,
            os.fdopen(config, "wb") as first,
            os.fdopen(weights, "wb") as second,
            os.fdopen(texts, "wb") as third,
        ):
            if not limits.chat:
                third.write(msgspec.msgpack.encode({}))
            layout = LAYOUTS[limits.layout]
            answer = unpack(source, first, second, limits.max_bytes, third if limits.chat else None, layout)
    except MotetError as error:
        answer = error.info()
    except MemoryError:
        answer = InvalidAdapter("the archive takes more memory to read than is allowed").info()
    except OSError as error:
        if error.errno == errno.EIO:
            raise
        answer = Unavailable("the registry's disk has no room to unpack the archive", retry_after_s=60.0).info()
    sys.stdout.buffer.write(msgspec.json.encode(answer))
