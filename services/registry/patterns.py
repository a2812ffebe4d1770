"""PEFT's `rank_pattern` and `alpha_pattern`: finds the key that applies to each module.

PEFT treats every key as a regular expression: the first key (in the file's order) for which
`re.match(rf"(.*\\.)?({key})$", module_path)` succeeds applies. Plain names are matched here. A real expression comes
from a tenant and may run for hours, so it is matched in a child process with limits on CPU time and memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from motet.services.registry.files import quoted, shown
from motet.shared.errors import InvalidAdapter

MAX_KEYS = 8192
MAX_KEY_CHARS = 512
MATCH_S = 3.0
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")

_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
keys, paths = json.load(sys.stdin)
compiled = []
for index, key in enumerate(keys):
    try:
        re.compile(key)
        compiled.append(re.compile(r"(.*\\.)?(" + key + ")$"))
    except (re.error, OverflowError, RecursionError) as error:
        print(json.dumps({"index": index, "reason": str(error)}))
        sys.exit()
chosen = [next((i for i, c in enumerate(compiled) if c.match(path)), -1) for path in paths]
print(json.dumps({"chosen": chosen}))
"""


class _Answer(msgspec.Struct):
    chosen: list[int] = []
    index: int = 0
    reason: str = ""


def assign(field: str, keys: Sequence[str], paths: Sequence[str]) -> dict[str, str]:
    """{module path: the key that applies to it}, without paths that no key matches.

    `field` is the config key, for messages. Raises InvalidAdapter for keys that are no regular expression, too long, too
    many, or too expensive to match. Blocks up to `MATCH_S`: call it in a thread.
    """
    if len(keys) > MAX_KEYS:
        raise InvalidAdapter(f"{field} has {len(keys)} keys, the limit is {MAX_KEYS}", param=field)
    if long := next((key for key in keys if len(key) > MAX_KEY_CHARS), None):
        raise InvalidAdapter(f"{field} key {quoted(long)} is longer than {MAX_KEY_CHARS} characters", param=field)
    if not keys:
        return {}
    plain = all(_PLAIN.fullmatch(key) for key in keys)
    chosen = _match_plain(keys, paths) if plain else _match_in_child(field, keys, paths)
    return {path: keys[index] for path, index in zip(paths, chosen, strict=True) if index >= 0}


def _match_plain(keys: Sequence[str], paths: Sequence[str]) -> list[int]:
    """Keys without operators: a key matches the whole path or its end after a dot; its own dots match any character."""
    by_length: dict[int, list[tuple[int, re.Pattern[str]]]] = {}
    for index, key in enumerate(keys):
        by_length.setdefault(len(key), []).append((index, re.compile(key)))
    chosen = []
    for path in paths:
        ends = [path] + [path[at + 1 :] for at, char in enumerate(path) if char == "."]
        hits = [i for end in ends for i, pattern in by_length.get(len(end), ()) if pattern.fullmatch(end)]
        chosen.append(min(hits, default=-1))
    return chosen


def _match_in_child(field: str, keys: Sequence[str], paths: Sequence[str]) -> list[int]:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=msgspec.json.encode([keys, paths]),
            capture_output=True,
            timeout=MATCH_S,
            check=True,
        )
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except (subprocess.SubprocessError, msgspec.MsgspecError):
        raise InvalidAdapter(
            f"{field}: its expressions take more time or memory to match than is allowed", param=field
        ) from None
    if answer.reason:
        key = keys[answer.index]
        raise InvalidAdapter(f"{field} key {quoted(key)} is not a regular expression: {shown(answer.reason)}", param=field)
    return answer.chosen
