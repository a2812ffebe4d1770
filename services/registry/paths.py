"""Adapters on this machine: a directory, an archive or a weights file below an allowed root.

All functions block and run in threads. A file is opened only if its real path (all links resolved) lies below a root and it
is a plain file. Clients see the location as they sent it, and a source relative to its root, so the roots' paths stay
private.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from typing import BinaryIO

from motet.services.registry.archives import read_archive, read_bare
from motet.services.registry.files import MAX_CONFIG_BYTES, PEFT, PICKLES, SUFFIX, Layout, PeftFiles, Texts, shown, too_large
from motet.shared.errors import InvalidAdapter, Unavailable
from motet.shared.text_files import TEMPLATES_DIR, is_text_file

PARAM = "location"


def is_below(path: str, roots: Sequence[str]) -> bool:
    """Whether the real path `path` is one of `roots` (real paths too) or below one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def relative_source(path: str, roots: Sequence[str]) -> str:
    """The published source of an adapter: `path:` and the path below its root."""
    root = next(root for root in roots if is_below(path, [root]))
    return f"path:{os.path.relpath(path, root)}"


def _open_plain(path: str, roots: Sequence[str]) -> BinaryIO:
    """Open a plain file below the roots for reading. Raises InvalidAdapter, or OSError when it cannot be opened."""
    real = os.path.realpath(path)
    name = shown(os.path.basename(path))
    if not is_below(real, roots):
        raise InvalidAdapter(f"{name} is a link to outside the allowed roots (--adapter-roots)", param=PARAM)
    # NONBLOCK: opening a named pipe must not wait for a writer
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidAdapter(f"{name} is not a plain file", param=PARAM)
    return os.fdopen(descriptor, "rb")


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def open_path(location: str, roots: Sequence[str], max_bytes: int, *, chat: bool = True, layout: Layout = PEFT) -> PeftFiles:
    """The adapter in the directory, archive or file `location`: absolute, or relative to the directory in which the registry
    was started, or to one of `roots`.

    `chat`: also read what it brings for chats. Raises InvalidAdapter or TooLarge with the reason, Unavailable when there is no
    room to unpack an archive. A location outside the roots is refused without touching it.
    """
    if not roots:
        raise InvalidAdapter("this registry takes no paths: it has no allowed roots (--adapter-roots)", param=PARAM)
    if "\0" in location or not location:
        raise InvalidAdapter("the path is empty or holds a zero byte", param=PARAM)
    allowed = _candidates(location, roots)
    if not allowed:
        raise InvalidAdapter(f"path {shown(location)} is outside the allowed roots (--adapter-roots)", param=PARAM)
    path = next((p for p in allowed if os.path.exists(p)), allowed[0])
    source = relative_source(path, roots)
    try:
        return open_found(path, roots, max_bytes, source=source, chat=chat, layout=layout)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Unavailable("the registry's disk has no room to unpack the archive", param=PARAM) from error
        raise InvalidAdapter(f"path {shown(location)}: {error.strerror or type(error).__name__}", param=PARAM) from None


def is_there(location: str, roots: Sequence[str]) -> bool:
    """Whether `location` exists as a path that `open_path` would open."""
    return "\0" not in location and any(map(os.path.exists, _candidates(location, roots)))


def _candidates(location: str, roots: Sequence[str]) -> list[str]:
    """The real paths below a root that `location` may refer to."""
    paths = [os.path.realpath(os.path.join(start, location)) for start in (os.getcwd(), *roots)]
    return [path for path in paths if is_below(path, roots)]


def open_found(
    path: str, roots: Sequence[str], max_bytes: int, *, source: str, chat: bool = True, layout: Layout = PEFT
) -> PeftFiles:
    """The adapter at a path that is known to be below `roots`. Also raises OSError when it cannot be read."""
    if os.path.isdir(path):
        return open_directory(path, roots, max_bytes, source=source, chat=chat, layout=layout)
    if path.endswith(PICKLES):
        name = shown(os.path.basename(path))
        raise InvalidAdapter(f"{name} is a pickle file: those can run code and are never opened", param=PARAM)
    with _open_plain(path, roots) as file:
        if path.endswith(SUFFIX):
            return read_bare(file, _size(file), max_bytes, source=source, layout=layout)
        return read_archive(file, _size(file), max_bytes, source=source, chat=chat, layout=layout)


def open_directory(
    path: str, roots: Sequence[str], max_bytes: int, *, source: str, chat: bool = True, layout: Layout = PEFT
) -> PeftFiles:
    """The adapter in a directory that is known to be below `roots`. Also raises OSError when it cannot be read."""
    name = layout.weights("the directory", os.listdir(path))
    config_json = b""
    if layout.configuration:
        with _open_plain(os.path.join(path, layout.configuration), roots) as file:
            config_json = file.read(MAX_CONFIG_BYTES + 1)
    texts = _texts(path, roots) if chat and layout.chats else {}
    weights = _open_plain(os.path.join(path, name), roots)
    size_bytes = _size(weights)
    if size_bytes > max_bytes:
        weights.close()
        raise too_large(shown(name), size_bytes, max_bytes)
    return PeftFiles(config_json=config_json, weights=weights, size_bytes=size_bytes, source=source, texts=texts)


def _texts(directory: str, roots: Sequence[str]) -> dict[str, bytes]:
    """What the directory brings for chats."""
    texts = Texts()
    folder = os.path.join(directory, TEMPLATES_DIR)
    more = [f"{TEMPLATES_DIR}/{name}" for name in os.listdir(folder)] if os.path.isdir(folder) else []
    for name in sorted([*os.listdir(directory), *more]):
        if is_text_file(name):
            limit = texts.limit(name)
            with _open_plain(os.path.join(directory, name), roots) as file:
                texts.add(name, file.read(limit + 1))
    return texts.found
