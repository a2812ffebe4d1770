"""Matches the names and regular expressions of an adapter's configuration against module paths, as PEFT does.

    assign        rank_pattern, alpha_pattern     the first key for which re.match(rf"(.*\\.)?({key})$", path) succeeds
    fully         target_modules, exclude_modules re.fullmatch(expression, path)
    layer_numbers layers_pattern                  the number after the first of the expressions that is found in the path

Plain names are matched here. A real expression comes from a tenant and may run for hours, so it is matched in a child process
with limits on CPU time and memory.
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
MAX_KEY_CHARS = 4096
MATCH_S = 3.0
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
how, keys, paths = json.load(sys.stdin)
compiled = []
for index, key in enumerate(keys):
    try:
        alone = re.compile(key)
        compiled.append({
            "end": lambda: re.compile(r"(.*\\.)?(" + key + ")$").match,
            "full": lambda: alone.fullmatch,
            "layer": lambda: re.compile(r"(?:^|.*?\\.)" + key + r"\\.(?P<idx>\\d+)\\.").match,
        }[how]())
    except (re.error, OverflowError, RecursionError) as error:
        print(json.dumps({"index": index, "reason": str(error)}))
        sys.exit()
found = [next(((i, m) for i, match in enumerate(compiled) if (m := match(path))), (-1, None)) for path in paths]
numbers = [m["idx"] or "" for _, m in found if m] if how == "layer" else []
print(json.dumps({"chosen": [i for i, _ in found], "numbers": numbers}))
"""


class _Answer(msgspec.Struct):
    chosen: list[int] = []  # for each path the index of the first key that matches, -1 for none
    numbers: list[str] = []  # for each path that a key matches, the number in it
    index: int = 0
    reason: str = ""


def assign(field: str, keys: Sequence[str], paths: Sequence[str]) -> dict[str, str]:
    """{module path: the key that applies to it}, without paths that no key matches.

    `field` is the config key, for messages. Raises InvalidAdapter for keys that are no regular expression, too long, too
    many, or too expensive to match. Blocks up to `MATCH_S`: call it in a thread.
    """
    _check_size(field, keys)
    if not keys:
        return {}
    plain = all(_PLAIN.fullmatch(key) for key in keys)
    chosen = _match_plain(keys, paths) if plain else _match_in_child(field, "end", keys, paths).chosen
    return {path: keys[index] for path, index in zip(paths, chosen, strict=True) if index >= 0}


def fully(field: str, expression: str, paths: Sequence[str]) -> set[str]:
    """The paths that `expression` matches from end to end. Raises and blocks like `assign`."""
    _check_size(field, [expression])
    chosen = _match_in_child(field, "full", [expression], paths).chosen
    return {path for path, index in zip(paths, chosen, strict=True) if index >= 0}


def layer_numbers(field: str, patterns: Sequence[str], paths: Sequence[str]) -> dict[str, int]:
    """{path: the layer's number in it}, without paths that have none. Without patterns it is the first number after a name.

    Raises and blocks like `assign`.
    """
    if not patterns:
        matches = {path: _ANY_LAYER.match(path) for path in paths}
        return {path: int(match["idx"]) for path, match in matches.items() if match and len(match["idx"]) < 10}
    _check_size(field, patterns)
    answer = _match_in_child(field, "layer", patterns, paths)
    found = [path for path, index in zip(paths, answer.chosen, strict=True) if index >= 0]
    return {path: int(number) for path, number in zip(found, answer.numbers, strict=True) if 0 < len(number) < 10}


def _check_size(field: str, keys: Sequence[str]) -> None:
    if len(keys) > MAX_KEYS:
        raise InvalidAdapter(f"{field} has {len(keys)} keys, the limit is {MAX_KEYS}", param=field)
    if long := next((key for key in keys if len(key) > MAX_KEY_CHARS), None):
        raise InvalidAdapter(f"{field} key {quoted(long)} is longer than {MAX_KEY_CHARS} characters", param=field)


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


def _match_in_child(field: str, how: str, keys: Sequence[str], paths: Sequence[str]) -> _Answer:
    """`how`: end, full or layer, as in the module's description."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=msgspec.json.encode([how, keys, paths]),
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
    return answer
