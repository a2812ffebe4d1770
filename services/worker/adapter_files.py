"""Files of adapters on a worker's disk, named by their digests."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from motet.shared.clock import unix_ms
from motet.shared.errors import BadRequest
from motet.shared.telemetry import logger

log = logger("motet.worker.adapters")
DIGEST = re.compile(r"[A-Za-z0-9_-]{1,128}")
SUFFIX, PARTIAL = ".safetensors", ".part"


class Stamp(NamedTuple):
    """Facts of a file that change when the file is written to or replaced."""

    inode: int
    size_bytes: int
    written_ns: int


class AdapterFiles:
    """Content-addressed files `<digest>.safetensors` in one directory: a private one, removed in the end, if none is given.

    Several workers may share the directory: files appear by atomic rename, and a file that another worker evicted is simply
    missing here. Every process that uses a file hashes it once: after fetching it, or before its first use when the directory
    already had it. After that inode, size and time of the last write tell whether it is still the file that was hashed; any
    other file is hashed again. So a file that was cut short, overwritten or replaced is found before it is used. A change
    without a write, such as a disk that returns other bytes, is found only by the next process. The order of use is kept in the
    access time.
    """

    def __init__(self, directory: str) -> None:
        self._private = not directory
        self._dir = Path(directory or tempfile.mkdtemp(prefix="motet-adapters-"))
        self._dir.mkdir(parents=True, exist_ok=True)
        self._remove_cut_off()
        self._hashed: dict[str, Stamp] = {}
        found = [(path.name.removesuffix(SUFFIX), path.stat()) for path in self._dir.glob("*" + SUFFIX)]
        self.found = [(digest, stat.st_size) for digest, stat in sorted(found, key=lambda item: item[1].st_atime_ns)]
        """The files in the directory at the start, as (digest, bytes), least recently used first."""

    def path(self, digest: str) -> Path:
        """The path of the adapter's file.

        Raises BadRequest for an invalid digest, because digests come from the bus and could name any file.
        """
        if not DIGEST.fullmatch(digest):
            raise BadRequest("not a digest", param="digest")
        return self._dir / (digest + SUFFIX)

    @contextlib.contextmanager
    def partial(self, digest: str) -> Iterator[tuple[Path, BinaryIO]]:
        """A context with the path for a download of `digest` that is not verified yet.

        The file is removed unless it was renamed.
        """
        path = self._dir / f".{self.path(digest).stem}.{secrets.token_hex(4)}{PARTIAL}"
        try:
            with path.open("wb") as sink:
                fcntl.flock(sink, fcntl.LOCK_EX)
                yield path, sink
        finally:
            path.unlink(missing_ok=True)

    def intact(self, digest: str) -> bool:
        """Whether the content of the file matches its digest. Counts as a use. Raises OSError when it cannot be read."""
        path = self.path(digest)
        stamp = _stamp(path)
        if self._hashed.get(digest) != stamp:
            self._hashed.pop(digest, None)
            if hash_of(path) != digest:
                return False
            self._hashed[digest] = stamp
        os.utime(path, ns=(unix_ms() * 1_000_000, stamp.written_ns))  # the order of use survives a restart
        return True

    def admit(self, partial: Path, digest: str) -> None:
        """Rename a download to its final name. The caller has compared its hash."""
        stamp = _stamp(partial)
        partial.replace(self.path(digest))
        self._hashed[digest] = stamp

    def _remove_cut_off(self) -> None:
        """Remove downloads that a crash cut short: they are not locked."""
        for path in self._dir.glob("*" + PARTIAL):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                log.info("cut-off download removed", extra={"file": path.name})

    @property
    def free_bytes(self) -> int:
        """Free bytes of the file system."""
        return shutil.disk_usage(self._dir).free

    def discard(self, digest: str) -> None:
        """Delete the file if it exists."""
        if DIGEST.fullmatch(digest):
            self._hashed.pop(digest, None)
            self.path(digest).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory if it is a private one."""
        if self._private:
            shutil.rmtree(self._dir, ignore_errors=True)


def hash_of(path: Path) -> str:
    """SHA-256 of the content, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return Stamp(stat.st_ino, stat.st_size, stat.st_mtime_ns)
