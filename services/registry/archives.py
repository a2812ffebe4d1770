"""Reads an adapter from an untrusted zip or tar archive, in a child process (`unpack`), or from a weights file alone.

The child has limits on memory, CPU time and written bytes. This side only passes open files and takes the answer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import msgspec

from motet.services.registry.files import PEFT, Layout, PeftFiles, is_bare, too_large
from motet.services.registry.unpack import MAX_OTHER_BYTES, Done, UnpackLimits
from motet.shared.errors import ErrorInfo, InvalidAdapter, MotetError, from_info
from motet.shared.telemetry import logger

log = logger("motet.registry.archives")
MEMORY_BYTES = 256 * 1024 * 1024  # address space of the child; an honest archive needs a sixth of it
CPU_BASE_S = 15
CPU_BYTES_PER_S = 32 * 1024 * 1024  # inflating runs at several times this
WALL_FACTOR = 4  # the child may share its core
_ROOT = Path(__file__).absolute().parents[3].resolve()  # where `motet` is: its rooms may be links, which are not followed
_PATHS = [str(_ROOT), str(Path(msgspec.__file__).parents[1])]  # for a child that does not look for packages: half of its start
CHILD = (
    f"import sys; sys.path[:0] = {_PATHS!r}; from motet.services.registry.unpack import main; "
    "main(sys.argv[1], *map(int, sys.argv[2:]))"
)


def read_archive(
    file: BinaryIO, size_bytes: int, max_bytes: int, source: str, *, chat: bool = True, layout: Layout = PEFT
) -> PeftFiles:
    """The adapter in a seekable archive of `size_bytes`, an open file, or in a bare weights file if `layout` has such.

    Blocks: call it in a thread. Raises InvalidAdapter or TooLarge with the reason, Unavailable when the disk is full. Whatever
    the archive holds, at most `max_bytes` plus a few megabytes are written to temporary files.
    """
    if is_bare(os.pread(file.fileno(), 9, 0)):
        return read_bare(file, size_bytes, max_bytes, source, layout=layout)
    if size_bytes > max_bytes + MAX_OTHER_BYTES:
        raise too_large("the archive", size_bytes, max_bytes + MAX_OTHER_BYTES)
    cpu_s = CPU_BASE_S + (max_bytes + MAX_OTHER_BYTES) // CPU_BYTES_PER_S
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(tempfile.TemporaryFile())
        weights = stack.enter_context(tempfile.TemporaryFile())
        texts = stack.enter_context(tempfile.TemporaryFile())
        limits = UnpackLimits(
            max_bytes=max_bytes, memory_bytes=MEMORY_BYTES, cpu_s=cpu_s, chat=chat and layout.chats, layout=layout.name
        )
        done = _in_child(limits, (file.fileno(), config.fileno(), weights.fileno(), texts.fileno()))
        for part in (config, weights, texts):
            part.seek(0)
        files = PeftFiles(
            config_json=config.read(),
            weights=weights,
            size_bytes=done.size_bytes,
            source=source,
            texts=msgspec.msgpack.decode(texts.read(), type=dict[str, bytes]),
        )
        config.close()
        texts.close()
        stack.pop_all()
    return files


def read_bare(file: BinaryIO, size_bytes: int, max_bytes: int, source: str, *, layout: Layout) -> PeftFiles:
    """The adapter that is one weights file of `size_bytes`, an open file, which the caller closes."""
    if not layout.bare:
        raise InvalidAdapter(
            "not a readable zip or tar archive: a weights file alone, as image adapters are; the base model here makes text,"
            f" and its adapters need an {layout.configuration} beside their weights",
            param="location",
        )
    if size_bytes > max_bytes:
        raise too_large("the file", size_bytes, max_bytes)
    weights = os.fdopen(os.dup(file.fileno()), "rb")
    weights.seek(0)
    return PeftFiles(config_json=b"", weights=weights, size_bytes=size_bytes, source=source)


def _in_child(limits: UnpackLimits, descriptors: tuple[int, ...]) -> Done:
    command = [sys.executable, "-I", "-S", "-c", CHILD, msgspec.json.encode(limits).decode(), *map(str, descriptors)]
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=descriptors,
            timeout=limits.cpu_s * WALL_FACTOR,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InvalidAdapter("the archive takes more time to read than is allowed") from None
    if child.returncode < 0:  # by a limit
        raise InvalidAdapter("the archive takes more time or memory to read than is allowed")
    try:
        if child.returncode == 0 and child.stdout.startswith(b'{"size_bytes"'):
            return msgspec.json.decode(child.stdout, type=Done)
        raise from_info(msgspec.json.decode(child.stdout, type=ErrorInfo))
    except msgspec.MsgspecError:
        log.error("unpacking failed", extra={"output": os.fsdecode(child.stderr[-2000:])})
        raise MotetError("the archive could not be read: the process that reads it failed") from None
