"""Recorded workloads: Motet's own format and five public ones, told apart by their first line. Plain or gzip.

    Motet       JSON lines; first {"motet_trace": 1, "adapters": [{"rank", "size_bytes"}], "slos": [{...}]}, then
                {"arrival_s", "adapter" (index, -1 for the base), "prompt_tokens", "output_tokens", "slo" (index)}
    Azure       CSV TIMESTAMP, ContextTokens, GeneratedTokens                           Azure LLM inference 2023
    Mooncake    JSON lines timestamp (ms), input_length, output_length, hash_ids        prefix blocks of 512 tokens
    MAF 2021    CSV app, func, end_timestamp, duration                                  functions as adapters
    GenTD26     CSV ... gmt_create ... lora_ids ...                                     rows with a time; first LoRA
    MAF 2019    CSV function, minute_1, ...                                             `read_popularity`: counts, not requests

Facts that a trace does not contain are None, and `Trace.workload` draws them. All contents are checked: a malformed file is a
FileError with line and field.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np
from numpy.random import Generator

from motet.shared.json_files import FileError
from motet.shared.model import Slo
from motet.twin.workload import Floats, Intensity, Ints, Lengths, Workload, pick

VERSION = 1
MAX_LINE = 1 << 20  # characters
MAX_TOKENS = 1 << 24
MOONCAKE_BLOCK = 512  # tokens
MAX_BLOCK_ID = 1 << 31

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Arrival times, ascending from 0, and whatever else the file states about the requests."""

    arrival_s: Floats
    adapter: Ints | None = None  # index by first appearance, -1 for the base
    adapters: int = 0
    prompt_tokens: Ints | None = None
    output_tokens: Ints | None = None
    prefix: Sequence[tuple[int, ...]] | None = None
    prefix_tokens: int = 0

    def workload(
        self,
        rng: Generator,
        *,
        ranks: Ints,
        adapter_bytes: Ints,
        shares: Floats | None = None,
        lengths: Lengths | None = None,
        slo: Slo = Slo(),  # noqa: B008 (frozen)
    ) -> Workload:
        """A workload. Missing adapters are drawn by `shares`, missing lengths from `lengths`.

        Raises ValueError without these.
        """
        n = len(self.arrival_s)
        prompt, output = self.prompt_tokens, self.output_tokens
        if prompt is None or output is None:
            if lengths is None:
                raise ValueError("the trace has no lengths and none are given")
            prompt, output = lengths.draw(rng, n)
        adapter = self.adapter
        if adapter is None:
            adapter = np.full(n, -1, np.int64) if shares is None else pick(rng, shares, n)
        return Workload(
            arrival_s=self.arrival_s,
            adapter=adapter,
            prompt_tokens=prompt,
            output_tokens=output,
            ranks=ranks,
            adapter_bytes=adapter_bytes,
            slos=(slo,),
            prefix=self.prefix,
            prefix_tokens=self.prefix_tokens,
        )


@dataclass(frozen=True)
class Popularity:
    """How often each of some functions was called. `shares` add up to 1; `intensity` is the rate of all together."""

    shares: Floats
    intensity: Intensity

    def scaled(self, rate: float) -> Intensity:
        """The same shape over time, with a mean of `rate` requests per second."""
        edges, rates = self.intensity.edges_s, self.intensity.rates
        mean = float(np.diff(edges) @ rates / edges[-1])
        return Intensity(edges, rates * (rate / mean))


# ---- reading


def read_trace(path: Path) -> Trace | Workload:
    """The trace in a file of any of the request formats; a file in Motet's own format gives a `Workload`. Raises FileError."""
    with opened(path) as lines:
        first = first_line(path, lines)
        if first.startswith("{"):
            return _motet(path, first, lines) if '"motet_trace"' in first else _mooncake(path, json_rows(path, first, lines))
        header = next(csv.reader([first]), [])
        for needed, read in _CSV:
            if needed <= set(header):
                return read(path, csv_rows(path, header, lines))
    known = "; ".join(",".join(sorted(needed)) for needed, _ in _CSV)
    raise FileError(path, 1, "", f"not a known trace: no JSON object, and no header with {known}")


def read_popularity(path: Path, minutes: range | None = None) -> Popularity:
    """MAF 2019: invocations per function and minute, of some `minutes` or all. Raises FileError."""
    table = read_invocations(path, minutes)
    per_minute = np.asarray(table.sum(axis=0) / 60.0, np.float64)
    edges_s = np.arange(table.shape[1] + 1, dtype=np.float64) * 60.0
    return Popularity(table.sum(axis=1) / table.sum(), Intensity(edges_s, per_minute))


def read_invocations(path: Path, minutes: range | None = None) -> Floats:
    """MAF 2019: invocations [functions, minutes], of some `minutes` or all. Raises FileError."""
    with opened(path) as lines:
        header = next(csv.reader([first_line(path, lines)]), [])
        names = [name for name in header if name.startswith("minute_")]
        if minutes is not None:
            names = [name for name in names if int(name.removeprefix("minute_")) in minutes]
        if "function" not in header or not names:
            raise FileError(path, 1, "", "not a table of invocations: no columns function, minute_1, ...")
        counts = [[whole(path, at, row, name, 0) for name in names] for at, row in csv_rows(path, header, lines)]
    table = np.array(counts, np.float64)
    if not table.sum():
        raise FileError(path, 1, "", "no invocations")
    return table


def read_lengths(path: Path) -> Lengths:
    """Pairs of prompt and output length. Raises FileError.

    The file is a CSV with num_prefill_tokens, num_decode_tokens (ShareGPT, arXiv), or JSON lines with prompt_tokens_est,
    output_tokens_est (Alpaca).
    """
    with opened(path) as lines:
        first = first_line(path, lines)
        if first.startswith("{"):
            names, rows = ("prompt_tokens_est", "output_tokens_est"), json_rows(path, first, lines)
        else:
            names = ("num_prefill_tokens", "num_decode_tokens")
            rows = csv_rows(path, next(csv.reader([first]), []), lines)
        pairs = [[whole(path, at, row, name, 1) for name in names] for at, row in rows]
    if not pairs:
        raise FileError(path, 1, "", "no rows")
    prompt, output = np.array(pairs, np.int64).T
    return Lengths(prompt, output)


def _azure(path: Path, rows: Iterable[tuple[int, Row]]) -> Trace:
    columns = [
        (
            date(path, at, row, "TIMESTAMP"),
            whole(path, at, row, "ContextTokens", 1),
            whole(path, at, row, "GeneratedTokens", 1),
        )
        for at, row in rows
    ]
    times, prompt, output = zip(*columns, strict=True) if columns else ((), (), ())
    return _sorted(times, prompt_tokens=prompt, output_tokens=output)


def _mooncake(path: Path, rows: Iterable[tuple[int, Row]]) -> Trace:
    times, prompt, output, prefix = [], [], [], []
    for at, row in rows:
        times.append(number(path, at, row, "timestamp") / 1000.0)
        prompt.append(whole(path, at, row, "input_length", 1))
        output.append(whole(path, at, row, "output_length", 1))
        ids = row.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < MAX_BLOCK_ID for i in ids):
            raise FileError(path, at, "hash_ids", f"must be a list of whole numbers from 0 to {MAX_BLOCK_ID - 1}")
        prefix.append(tuple(ids))
    return _sorted(times, prompt_tokens=prompt, output_tokens=output, prefix=prefix, prefix_tokens=MOONCAKE_BLOCK)


def _maf2021(path: Path, rows: Iterable[tuple[int, Row]]) -> Trace:
    times, names = [], []
    for at, row in rows:
        times.append(number(path, at, row, "end_timestamp") - number(path, at, row, "duration"))
        names.append(text(path, at, row, "func"))
    return _sorted(times, names=names)


def _gentd26(path: Path, rows: Iterable[tuple[int, Row]]) -> Trace:
    times, names = [], []
    for at, row in rows:
        if row["gmt_create"]:
            times.append(date(path, at, row, "gmt_create"))
            names.append(text(path, at, row, "lora_ids").split(";")[0])
    return _sorted(times, names=names)


_CSV: list[tuple[set[str], Callable[[Path, Iterable[tuple[int, Row]]], Trace]]] = [
    ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    ({"func", "end_timestamp", "duration"}, _maf2021),
    ({"gmt_create", "lora_ids"}, _gentd26),
]


def _sorted(
    times: Sequence[float],
    *,
    names: Sequence[str] | None = None,
    prompt_tokens: Sequence[int] | None = None,
    output_tokens: Sequence[int] | None = None,
    prefix: Sequence[tuple[int, ...]] | None = None,
    prefix_tokens: int = 0,
) -> Trace:
    """The requests by time, counted from the first arrival. Equal times keep their order."""
    at = np.array(times, np.float64)
    order = np.argsort(at, kind="stable")
    index: dict[str, int] = {}
    if names is not None:
        for row in order.tolist():
            if names[row]:
                index.setdefault(names[row], len(index))

    def column(values: Sequence[int] | None) -> Ints | None:
        return None if values is None else np.array(values, np.int64)[order]

    return Trace(
        arrival_s=at[order] - (at[order[0]] if len(at) else 0.0),
        adapter=None if names is None else np.array([index.get(names[row], -1) for row in order.tolist()], np.int64),
        adapters=len(index),
        prompt_tokens=column(prompt_tokens),
        output_tokens=column(output_tokens),
        prefix=None if prefix is None else [prefix[row] for row in order.tolist()],
        prefix_tokens=prefix_tokens,
    )


# ---- Motet's own


class _Adapter(msgspec.Struct, forbid_unknown_fields=True):
    rank: int
    size_bytes: int


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    motet_trace: int
    adapters: list[_Adapter]
    slos: list[Slo]


def write_trace(path: Path, workload: Workload) -> None:
    """Write `workload` in Motet's format; prefixes are not kept."""
    adapters = [
        {"rank": rank, "size_bytes": size}
        for rank, size in zip(workload.ranks.tolist(), workload.adapter_bytes.tolist(), strict=True)
    ]
    header = {"motet_trace": VERSION, "adapters": adapters, "slos": msgspec.to_builtins(list(workload.slos))}
    columns = (workload.arrival_s, workload.adapter, workload.prompt_tokens, workload.output_tokens, workload.objective)
    names = ("arrival_s", "adapter", "prompt_tokens", "output_tokens", "slo")
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for row in zip(*(column.tolist() for column in columns), strict=True):
            file.write(json.dumps(dict(zip(names, row, strict=True))) + "\n")


def _motet(path: Path, first: str, lines: Iterator[str]) -> Workload:
    version = _object(path, 1, first).get("motet_trace")
    if version != VERSION:
        raise FileError(path, 1, "motet_trace", f"version {version!r}; this program reads version {VERSION}")
    try:
        header = msgspec.json.decode(first, type=_Header)
    except msgspec.MsgspecError as error:
        raise FileError(path, 1, "", str(error)) from None
    for place, known in enumerate(header.adapters):
        if known.rank < 1 or known.size_bytes < 1:
            raise FileError(path, 1, f"adapters[{place}]", "rank and size_bytes must be at least 1")
    if not header.slos:
        raise FileError(path, 1, "slos", "at least one is needed")
    columns: tuple[list[Any], ...] = ([], [], [], [], [])
    for at, row in json_rows(path, "", lines):
        values = (
            number(path, at, row, "arrival_s"),
            whole(path, at, row, "adapter", -1, len(header.adapters) - 1),
            whole(path, at, row, "prompt_tokens", 1),
            whole(path, at, row, "output_tokens", 1),
            whole(path, at, row, "slo", 0, len(header.slos) - 1),
        )
        if values[0] < (columns[0][-1] if columns[0] else 0.0):
            raise FileError(path, at, "arrival_s", f"{values[0]:g} is before the line above, or negative")
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    arrival_s, adapter, prompt, output, slo = columns
    return Workload(
        arrival_s=np.array(arrival_s, np.float64),
        adapter=np.array(adapter, np.int64),
        prompt_tokens=np.array(prompt, np.int64),
        output_tokens=np.array(output, np.int64),
        slo=np.array(slo, np.int64),
        slos=tuple(header.slos),
        ranks=np.array([a.rank for a in header.adapters], np.int64),
        adapter_bytes=np.array([a.size_bytes for a in header.adapters], np.int64),
    )


# ---- lines and fields


@contextmanager
def opened(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a file. Raises FileError, with the line reached, if it cannot be opened, unpacked or decoded."""
    at = 0

    def lines(file: TextIO) -> Iterator[str]:
        nonlocal at
        while line := file.readline(MAX_LINE + 1):
            at += 1
            if len(line) > MAX_LINE:
                raise FileError(path, at, "", f"longer than {MAX_LINE} characters")
            yield line

    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as file:
            yield lines(file)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(path, at + 1, "", str(error)) from None


def first_line(path: Path, lines: Iterator[str]) -> str:
    """The first line of a file. Raises FileError if it is empty."""
    first = next(lines, "").strip()
    if not first:
        raise FileError(path, 1, "", "empty")
    return first


def csv_rows(path: Path, header: list[str], lines: Iterator[str]) -> Iterator[tuple[int, Row]]:
    """(line number, row) of a CSV whose header was read. Raises FileError."""
    for at, values in enumerate(csv.reader(lines), start=2):
        if len(values) != len(header):
            raise FileError(path, at, "", f"{len(values)} columns, the header has {len(header)}")
        yield at, dict(zip(header, values, strict=True))


def json_rows(path: Path, first: str, lines: Iterator[str]) -> Iterator[tuple[int, Row]]:
    """Rows of JSON lines; `first` is line 1, or "" when that was a header."""
    head = [(1, first)] if first else []
    for at, line in itertools.chain(head, enumerate(lines, start=2)):
        yield at, _object(path, at, line)


def _object(path: Path, at: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(path, at, "", f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise FileError(path, at, "", "not a JSON object")
    return row


def number(path: Path, at: int, row: Row, name: str) -> float:
    """The finite number in a field. Raises FileError."""
    value = row.get(name)
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise FileError(path, at, name, f"{value!r} is not a finite number")
    return found


def whole(path: Path, at: int, row: Row, name: str, least: int, most: int = MAX_TOKENS) -> int:
    """The whole number in a field. Raises FileError."""
    value = number(path, at, row, name)
    if value != int(value) or not least <= value <= most:
        raise FileError(path, at, name, f"{row[name]!r} is not a whole number from {least} to {most}")
    return int(value)


def text(path: Path, at: int, row: Row, name: str) -> str:
    """The text in a field. Raises FileError."""
    value = row.get(name)
    if not isinstance(value, str):
        raise FileError(path, at, name, "missing")
    return value


def date(path: Path, at: int, row: Row, name: str) -> float:
    """The seconds of a date and time."""
    value = text(path, at, row, name)
    try:
        return datetime.fromisoformat(value + "+00:00").timestamp()
    except ValueError:
        raise FileError(path, at, name, f"{value!r} is not a date and time") from None
