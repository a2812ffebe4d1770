"""Files of adapters on a worker's disk, named by their digests."""

from __future__ import annotations

import contextlib
import fcntl
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from motet.shared.errors import BadRequest
from motet.shared.telemetry import logger

log = logger("motet.worker.adapters")
DIGEST = re.compile(r"[A-Za-z0-9_-]{1,128}")
SUFFIX, PARTIAL = ".safetensors", ".part"


class AdapterFiles:
    """Content-addressed files `<digest>.safetensors` in one directory; a private one that is removed in the end if none is
    given.

    Several workers may share the directory: files appear by atomic rename, and one that another worker evicted is
    simply missing here.
    """

    def __init__(self, directory: str) -> None:
        self._private = not directory
        self._dir = Path(directory or tempfile.mkdtemp(prefix="motet-adapters-"))
        self._dir.mkdir(parents=True, exist_ok=True)
        self._remove_cut_off()
        found = [(path.name.removesuffix(SUFFIX), path.stat()) for path in self._dir.glob("*" + SUFFIX)]
        self.found = [(digest, stat.st_size) for digest, stat in sorted(found, key=lambda item: item[1].st_mtime)]
        """What the directory held at the start, as (digest, bytes), least recently used first."""

    def path(self, digest: str) -> Path:
        """Where its file is. Raises BadRequest for what cannot be a digest: it comes from the bus and could name any file."""
        if not DIGEST.fullmatch(digest):
            raise BadRequest("not a digest", param="digest")
        return self._dir / (digest + SUFFIX)

    @contextlib.contextmanager
    def partial(self, digest: str) -> Iterator[tuple[Path, BinaryIO]]:
        """Where a download of `digest` is written before it is known to be right; gone afterwards unless it was renamed."""
        path = self._dir / f".{self.path(digest).stem}.{secrets.token_hex(4)}{PARTIAL}"
        try:
            with path.open("wb") as sink:
                fcntl.flock(sink, fcntl.LOCK_EX)
                yield path, sink
        finally:
            path.unlink(missing_ok=True)

    def _remove_cut_off(self) -> None:
        """Downloads that a crash cut short: nobody holds their lock."""
        for path in self._dir.glob("*" + PARTIAL):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                log.info("cut-off download removed", extra={"file": path.name})

    @property
    def free_bytes(self) -> int:
        """What the file system can still take."""
        return shutil.disk_usage(self._dir).free

    def discard(self, digest: str) -> None:
        """Delete the file, if there is one."""
        if DIGEST.fullmatch(digest):
            self.path(digest).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory when it is a private one."""
        if self._private:
            shutil.rmtree(self._dir, ignore_errors=True)
