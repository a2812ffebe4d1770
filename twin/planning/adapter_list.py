"""A file of adapters and the load on each: CSV with a header, or JSON lines. Plain or gzip.

    name, rank, rate      the adapter, its rank (0: the base model), its requests per second
    bytes                 on a device; by default rank x the size of a rank
    prompt_tokens, output_tokens          means
    prompt_deviation, output_deviation    standard deviations; by default the means (as in an exponential distribution)
    class                 of the objective

All but the first three are optional. A malformed file is a FileError with line and field.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from motet.shared.json_files import FileError
from motet.shared.model import Slo, is_adapter_name
from motet.twin.planning.loads import Loads, Objective
from motet.twin.traces import Row, csv_rows, first_line, json_rows, number, opened, text, whole
from motet.twin.workload import Lengths

NEEDED = ("name", "rank", "rate")
OPTIONAL = ("bytes", "prompt_tokens", "output_tokens", "prompt_deviation", "output_deviation", "class")
MOST_ADAPTERS = 1_000_000
MOST_RANK = 4096
MOST_RATE = 1e6
MOST_CV = 5.0
DEFAULT_CLASS = Slo().slo_class


def read_adapters(
    path: Path,
    *,
    objectives: Mapping[str, Objective],
    rank_bytes: float,
    prompt_tokens: float,
    output_tokens: float,
    lengths: Lengths | None = None,
    cv: float = 1.0,
) -> Loads:
    """The adapters in a file. `objectives` by class; `prompt_tokens` and `output_tokens` are the means where the file has none.

    With `lengths` all requests draw from this pool, and lengths in the file are an error. Raises FileError.
    """
    rows = list(_rows(path))
    names, ranks, rates, sizes, pool, classes = [], [], [], [], [], []
    pools: dict[tuple[float, ...], int] = {}
    order = {name: place for place, name in enumerate(objectives)}
    lines: dict[str, int] = {}
    for at, row in rows:
        name = text(path, at, row, "name")
        if not is_adapter_name(name):
            raise FileError(path, at, "name", f"{name!r} is not a name of an adapter")
        if name in lines:
            raise FileError(path, at, "name", f"{name!r} is in line {lines[name]} too")
        lines[name] = at
        names.append(name)
        ranks.append(whole(path, at, row, "rank", 0, MOST_RANK))
        rates.append(_between(path, at, row, "rate", 0.0, MOST_RATE))
        sizes.append(whole(path, at, row, "bytes", 1, 1 << 50) if _has(row, "bytes") else round(ranks[-1] * rank_bytes))
        classes.append(_class(path, at, row, order))
        key = _lengths(path, at, row, prompt_tokens, output_tokens, drawn=lengths is not None)
        pool.append(pools.setdefault(key, len(pools)))
    return Loads(
        names=tuple(names),
        rate=np.array(rates),
        rank=np.array(ranks, np.int64),
        size_bytes=np.array(sizes, np.int64),
        pool=np.array(pool, np.int64),
        objective=np.array(classes, np.int64),
        lengths=(lengths,) if lengths is not None else tuple(_pool(key) for key in pools),
        objectives=tuple(objectives.values()),
        cv=cv,
        peakedness=max(1.0, cv * cv),
    )


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    with opened(path) as lines:
        first = first_line(path, lines)
        if first.startswith("{"):
            rows = json_rows(path, first, lines)
        else:
            header = next(csv.reader([first]))
            _check(path, 1, header)
            rows = csv_rows(path, header, lines)
        count = 0
        for count, (at, row) in enumerate(rows, start=1):
            if count > MOST_ADAPTERS:
                raise FileError(path, at, "", f"more than {MOST_ADAPTERS:,} adapters")
            if first.startswith("{"):
                _check(path, at, list(row))
            yield at, row
        if not count:
            raise FileError(path, 2, "", "no adapters")


def _check(path: Path, at: int, names: Sequence[str]) -> None:
    """Raises FileError if a needed field is missing, or one is not known or there twice."""
    for name in NEEDED:
        if name not in names:
            raise FileError(path, at, name, "missing")
    for name in names:
        if name not in NEEDED + OPTIONAL:
            raise FileError(path, at, name, f"not known; the fields are {', '.join(NEEDED + OPTIONAL)}")
        if names.count(name) > 1:
            raise FileError(path, at, name, "twice")


def _has(row: Row, name: str) -> bool:
    return row.get(name) not in (None, "")


def _between(path: Path, at: int, row: Row, name: str, above: float, most: float) -> float:
    value = number(path, at, row, name)
    if not above < value <= most:
        raise FileError(path, at, name, f"{value:g} is not above {above:g} and up to {most:g}")
    return value


def _class(path: Path, at: int, row: Row, order: Mapping[str, int]) -> int:
    default = DEFAULT_CLASS if DEFAULT_CLASS in order else next(iter(order))
    name = text(path, at, row, "class") if _has(row, "class") else default
    if name not in order:
        raise FileError(path, at, "class", f"{name!r} has no objective; give --slo {name}:ttft=...,tpot=...")
    return order[name]


def _lengths(path: Path, at: int, row: Row, prompt_tokens: float, output_tokens: float, *, drawn: bool) -> tuple[float, ...]:
    found = []
    for kind, default in (("prompt", prompt_tokens), ("output", output_tokens)):
        mean = _between(path, at, row, f"{kind}_tokens", 0.0, 1e6) if _has(row, f"{kind}_tokens") else default
        deviation = (
            _between(path, at, row, f"{kind}_deviation", -1e-9, MOST_CV * mean) if _has(row, f"{kind}_deviation") else mean
        )
        if drawn and (_has(row, f"{kind}_tokens") or _has(row, f"{kind}_deviation")):
            raise FileError(path, at, f"{kind}_tokens", "lengths are in --lengths already")
        found += [mean, deviation / mean]
    return tuple(found)


def _pool(key: tuple[float, ...]) -> Lengths:
    prompt, prompt_cv, output, output_cv = key
    return Lengths.lognormal(
        np.random.default_rng(0), prompt_mean=prompt, output_mean=output, prompt_cv=prompt_cv, output_cv=output_cv
    )
