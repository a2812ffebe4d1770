"""Summarizes the lines of each stage in one line of figures. Pure; a figure whose points are missing is None."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]
Figures = dict[str, Any]
OURS = ("apart", "beside", "after")  # ways of launching our kernels


@dataclass(frozen=True, slots=True)
class Stage:
    """The title of a stage, and how its figures follow from its lines."""

    title: str
    figures: Callable[[Sequence[Line]], Figures]


def _limits(lines: Sequence[Line]) -> Figures:
    every = {key: value for line in lines for key, value in line.items()}
    names = (
        "read_gb_s",
        "bf16_tflop_s",
        "node_us",
        "triton_node_us",
        "word_us",
        "round_trip_us_p50",
        "page_map_us",
        "page_unmap_us",
    )
    return {name: _rounded(every.get(name)) for name in names}


def _correctness(lines: Sequence[Line]) -> Figures:
    errors = [line["worst_error"] for line in lines if "worst_error" in line]
    return {
        "checks": len(lines),
        "wrong": sum(not line["good"] for line in lines),
        "worst_error": max(errors, default=None),
    }


def _decode(lines: Sequence[Line]) -> Figures:
    found: Figures = {}
    for adapters in (8, 32):
        line = _first(lines, adapters=adapters, rows=adapters, ranks="mixed") or _first(lines, adapters=adapters, rows=adapters)
        added = None if line is None else min((line[name] for name in OURS if name in line), default=None)
        found[f"fraction_of_floor_{adapters}"] = None if line is None or not added else _rounded(line["floor"] / added)
    return found


def _serving(lines: Sequence[Line]) -> Figures:
    found: Figures = {}
    for adapters in (32, 256):
        line = _first(lines, requests=adapters, adapters=adapters)
        base = None if line is None else _first(lines, requests=adapters, adapters=0, model=line["model"])
        both = base is not None and line is not None
        found[f"keeps_{adapters}"] = _rounded(line["tokens_per_s"] / base["tokens_per_s"]) if both else None  # type: ignore[index]
    line = _first(lines, requests=32, adapters=32)
    found["roofline_fraction"] = _rounded(line["roofline_ms"] / line["decode_ms"]) if line is not None else None
    return found


def _cold(lines: Sequence[Line]) -> Figures:
    bursts = [line for line in lines if line["point"].startswith("burst")]
    ratios = [line["auto"]["ttft_ms"] / line["cached"]["ttft_ms"] for line in bursts]
    stalls = [line["auto"]["gap_p99_ms"] / line["cached"]["gap_p99_ms"] for line in bursts]
    return {
        "ttft_vs_cached": _rounded(statistics.fmean(ratios)) if ratios else None,
        "others_stall": _rounded(statistics.fmean(stalls)) if stalls else None,
    }


def _fits(lines: Sequence[Line]) -> Figures:
    every = {key: value for line in lines for key, value in line.items()}
    return {name: _rounded(every.get(name)) for name in ("r2_bgmv", "r2_mbgmv")}


def _kernels(lines: Sequence[Line]) -> Figures:
    line = max(lines, key=lambda one: one.get("requests", 0), default=None)
    return {name: _rounded(line[name]) if line else None for name in ("busy_fraction", "lora_share", "attention_share")}


def _peers(lines: Sequence[Line]) -> Figures:
    """What LoRA adds with Motet's best way, as a share of what it adds with each other's best, by load and at worst."""
    found: Figures = {}
    for peer in ("vllm", "sglang"):
        ratios = {}
        for line in lines:
            ours = [line[name] for name in OURS if name in line]
            theirs = [value for name, value in line.items() if name.startswith(peer)]
            if ours and theirs:
                rows = "" if line["rows"] == line["adapters"] else f"{line['rows']}_"
                ratios[f"vs_{peer}_{rows}{line['adapters']}_{line['ranks']}"] = _rounded(min(ours) / min(theirs))
        found |= {f"worst_vs_{peer}": max(ratios.values(), default=None)} | ratios
    return found


def _first(lines: Sequence[Line], **wanted: object) -> Line | None:
    return next((line for line in lines if all(line.get(key) == value for key, value in wanted.items())), None)


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


STAGES = {
    1: Stage("limits", _limits),
    2: Stage("correctness", _correctness),
    3: Stage("decode table", _decode),
    4: Stage("end to end", _serving),
    5: Stage("cold starts", _cold),
    6: Stage("models and twin", _fits),
    7: Stage("profile", _kernels),
    8: Stage("peers", _peers),
}
