"""Where adapters come from: a path below an allowed root, the Hugging Face hub, or an archive that was uploaded.

All of it blocks and runs in threads, each kind in its own few: a slow hub takes no thread away from local files. A file is
opened only after its real path (all links resolved) was found to lie below a root, and only when it is a plain file.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Sequence
from typing import BinaryIO

from services.registry.archives import CONFIG, PICKLES, WEIGHTS, PeftFiles, missing_weights, read_archive
from services.registry.peft import MAX_CONFIG_BYTES
from shared.errors import InvalidAdapter, TooLarge, Unavailable

PARAM = "location"
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
HUB_TIMEOUT_S = 10.0


def is_below(path: str, roots: Sequence[str]) -> bool:
    """Whether the real path `path` is one of `roots` (real paths too) or lies below one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _open_plain(path: str, roots: Sequence[str]) -> BinaryIO:
    """Open a plain file below the roots for reading. Raises InvalidAdapter, or OSError when it cannot be opened."""
    real = os.path.realpath(path)
    if not is_below(real, roots):
        raise InvalidAdapter(f"{os.path.basename(path)} is a link to outside the allowed roots", param=PARAM)
    # NONBLOCK: opening a named pipe must not wait for a writer
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidAdapter(f"{os.path.basename(path)} is not a plain file", param=PARAM)
    return os.fdopen(descriptor, "rb")


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def open_path(location: str, roots: Sequence[str], max_bytes: int) -> PeftFiles:
    """The adapter in the directory or archive `location` (absolute, or relative to one of `roots`).

    Raises InvalidAdapter or TooLarge with the reason. What lies outside the roots is refused without a look at it.
    """
    if not roots:
        raise InvalidAdapter("this registry takes no paths: it has no allowed roots (--adapter-roots)", param=PARAM)
    if "\0" in location or not location:
        raise InvalidAdapter("the path is empty or holds a zero byte", param=PARAM)
    candidates = [os.path.realpath(os.path.join(root, location)) for root in roots]
    allowed = [path for path in candidates if is_below(path, roots)]
    if not allowed:
        raise InvalidAdapter(f"path {location} is outside the allowed roots", param=PARAM)
    path = next((p for p in allowed if os.path.exists(p)), allowed[0])
    try:
        if os.path.isdir(path):
            return open_directory(path, roots, max_bytes, source=f"path:{path}")
        if path.endswith(PICKLES):
            raise InvalidAdapter(f"{location} is a pickle file: those can run code and are never opened", param=PARAM)
        with _open_plain(path, roots) as file:
            return read_archive(file, _size(file), max_bytes, source=f"path:{path}")
    except OSError as error:
        raise InvalidAdapter(f"path {location}: {error.strerror or error}", param=PARAM) from None


def open_directory(path: str, roots: Sequence[str], max_bytes: int, *, source: str) -> PeftFiles:
    """The adapter in a directory that is known to lie below `roots`. Raises OSError as well when it cannot be read."""
    names = set(os.listdir(path))
    if WEIGHTS not in names:
        raise missing_weights("the directory", names)
    if CONFIG not in names:
        raise InvalidAdapter(f"the directory holds no {CONFIG}", param=PARAM)
    with _open_plain(os.path.join(path, CONFIG), roots) as file:
        config_json = file.read(MAX_CONFIG_BYTES + 1)
    weights = _open_plain(os.path.join(path, WEIGHTS), roots)
    size_bytes = _size(weights)
    if size_bytes > max_bytes:
        weights.close()
        raise TooLarge(f"{WEIGHTS} has {size_bytes} bytes, the limit is {max_bytes}", param=PARAM)
    return PeftFiles(config_json=config_json, weights=weights, size_bytes=size_bytes, source=source)


def open_hub(location: str, max_bytes: int) -> PeftFiles:
    """The adapter `owner/name` or `owner/name@revision` on the Hugging Face hub. Sizes are checked before the download.

    Raises InvalidAdapter for what the hub does not have or hold, Unavailable when it cannot be reached. Credentials are
    the process's own (`HF_TOKEN`).
    """
    match = HUB_ID.fullmatch(location)
    if match is None:
        raise InvalidAdapter(f"{location!r} is not a hub id (owner/name or owner/name@revision)", param=PARAM)
    import huggingface_hub as hub
    from huggingface_hub import errors

    repository, revision = match[1], match[2]
    try:
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if WEIGHTS not in sizes:
            raise missing_weights(f"{location} on the hub", set(sizes))
        if CONFIG not in sizes:
            raise InvalidAdapter(f"{location} on the hub holds no {CONFIG}", param=PARAM)
        for name, limit in ((CONFIG, MAX_CONFIG_BYTES), (WEIGHTS, max_bytes)):
            if sizes[name] > limit:
                raise TooLarge(f"{location} on the hub: {name} has {sizes[name]} bytes, the limit is {limit}", param=PARAM)
        with tempfile.TemporaryDirectory(prefix="motet-hub-") as directory:
            real = os.path.realpath(directory)
            for name in (CONFIG, WEIGHTS):
                hub.hf_hub_download(repository, name, revision=info.sha, local_dir=real, etag_timeout=HUB_TIMEOUT_S)
            # the open file outlives its directory entry
            return open_directory(real, [real], max_bytes, source=f"hub:{repository}@{info.sha}")
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise InvalidAdapter(f"the hub has no {location}, or it is private: {_first_line(error)}", param=PARAM) from None
    except (OSError, errors.HTTPError) as error:
        raise Unavailable(
            f"cannot get {location} from the Hugging Face hub: {_first_line(error)}; register it from a path or an upload",
            param=PARAM,
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
