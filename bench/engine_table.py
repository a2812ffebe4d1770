"""The table of the engine bench: what was measured, its figures, and how it is shown and recorded."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from bench import report, roofline
from bench.engine_parent import Lap
from bench.models import Shape

Kind = Literal["none", "one", "each"]
KINDS: tuple[Kind, ...] = ("none", "one", "each")
BATCHES = (1, 8, 32)
WEIGHT_BYTES = {
    "motet none": 2.0, "motet int8": 1.0, "motet int4": 9 / 16, "motet again": 2.0,
    "llama bf16": 2.0, "llama q8_0": 34 / 32, "llama q4_0": 18 / 32, "vllm bf16": 2.0, "peft bf16": 2.0,
}  # fmt: skip
"""Bytes of a base weight with its scales, by contestant."""
LABELS = {
    "motet none": "Motet bf16", "motet int8": "Motet int8", "motet int4": "Motet int4", "motet again": "Motet bf16, again",
    "llama bf16": "llama.cpp BF16", "llama q8_0": "llama.cpp Q8_0", "llama q4_0": "llama.cpp Q4_0",
    "vllm bf16": "vLLM bf16", "peft bf16": "transformers + PEFT bf16",
}  # fmt: skip


class Turn(NamedTuple):
    """One cell of the table: `batch` requests at once, with or without adapters."""

    kind: Kind
    batch: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One lap: output tokens per second, in total and without the prompts and first tokens (0 if unknown), each first token,
    and the machine's limits just before and after it (None if unknown).
    """

    whole: float
    decode: float
    first: tuple[int, ...]
    limits: roofline.Limits | None = None


def timed(lap: Lap, alone: Lap | None = None, limits: roofline.Limits | None = None) -> Timed:
    """The rates of a lap. `alone`: a lap of as many requests with one token each, which gives the time of the prompts."""
    after_first = sum(len(output) - 1 for output in lap.outputs)
    decode = after_first / max(lap.seconds - alone.seconds, 1e-9) if alone is not None else 0.0
    return Timed(lap.tokens_per_s, decode, tuple(output[0] for output in lap.outputs), limits)


@dataclass(slots=True)
class Measured:
    """The laps by contestant and cell."""

    laps: dict[str, dict[Turn, list[Timed]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def add(self, name: str, turn: Turn, lap: Timed) -> None:
        """Add a lap."""
        self.laps[name][turn].append(lap)

    def rate(self, name: str, turn: Turn, part: Literal["whole", "decode"] = "whole") -> float | None:
        """The median over the laps, in output tokens per second; None without laps."""
        laps = self.laps.get(name, {}).get(turn)
        return statistics.median(getattr(lap, part) for lap in laps) if laps else None

    def ratio(self, above: tuple[str, Turn], below: tuple[str, Turn]) -> float | None:
        """The median over the rounds, each of which compares two laps of nearly the same time; None without laps."""
        pairs = zip(*(self.laps.get(name, {}).get(turn, []) for name, turn in (above, below)), strict=False)
        ratios = [one.whole / other.whole for one, other in pairs]
        return statistics.median(ratios) if ratios else None

    def cells(self) -> Iterator[tuple[str, Turn, float]]:
        """All rates: contestant, cell, output tokens per second."""
        for name, turns in self.laps.items():
            for turn in sorted(turns, key=lambda one: (KINDS.index(one.kind), one.batch)):
                yield name, turn, self.rate(name, turn) or 0.0

    def agreement(self, ours: str, theirs: str) -> float | None:
        """The share of requests without adapters whose first tokens two contestants agree on: 1 except for near-ties."""
        pairs = [
            pair
            for turn, laps in self.laps.get(ours, {}).items()
            if turn.kind == "none"
            for mine, other in zip(laps, self.laps.get(theirs, {}).get(turn, []), strict=False)
            for pair in zip(mine.first, other.first, strict=True)
        ]
        return round(sum(a == b for a, b in pairs) / len(pairs), 3) if pairs else None


RATIOS: dict[str, tuple[tuple[str, Turn], tuple[str, Turn]]] = {
    "int8_b1_vs_bf16": (("motet int8", Turn("none", 1)), ("motet none", Turn("none", 1))),
    "int8_b32_vs_bf16": (("motet int8", Turn("none", 32)), ("motet none", Turn("none", 32))),
    "lora_one_vs_own_base": (("motet none", Turn("one", 32)), ("motet none", Turn("none", 32))),
    "lora32_vs_own_base": (("motet none", Turn("each", 32)), ("motet none", Turn("none", 32))),
    "b1_vs_llama_bf16": (("motet none", Turn("none", 1)), ("llama bf16", Turn("none", 1))),
    "b1_int4_vs_llama_q4": (("motet int4", Turn("none", 1)), ("llama q4_0", Turn("none", 1))),
    "b32_vs_llama_bf16": (("motet none", Turn("none", 32)), ("llama bf16", Turn("none", 32))),
    "base_b1_vs_vllm": (("motet again", Turn("none", 1)), ("vllm bf16", Turn("none", 1))),
    "base_vs_vllm": (("motet again", Turn("none", 32)), ("vllm bf16", Turn("none", 32))),
    "lora32_vs_vllm": (("motet again", Turn("each", 32)), ("vllm bf16", Turn("each", 32))),
    "lora32_vs_peft": (("motet again", Turn("each", 32)), ("peft bf16", Turn("each", 32))),
}
"""Figures that are ratios of two rates."""


# in one piece: a measurement is read from top to bottom, from its cases to its figures
def figures(
    measured: Measured,
    shape: Shape,
    limits: roofline.Limits,
    prompt_tokens: int,
    output_tokens: int,
    chosen: Callable[[str, Turn], Sequence[int] | None],
) -> dict[str, Any]:
    """The bench's figures of these contestants. `chosen`: the adapter of each request of a cell."""
    found: dict[str, Any] = {}
    for figure, (ours, theirs) in RATIOS.items():
        ratio = measured.ratio(ours, theirs)
        if ratio is not None:
            found[figure] = round(ratio, 3)
    each, without = Turn("each", 32), measured.rate("motet none", Turn("none", 32))
    if "lora32_vs_own_base" in found and without is not None:
        seconds, adapters = each.batch * output_tokens / without, chosen("motet none", each) or ()
        at = [(lap.limits or limits).bytes_per_s for lap in measured.laps["motet none"][each]]
        kept = [roofline.kept_with_adapters(one, shape, adapters, output_tokens, seconds) for one in at]
        found["lora32_bound"] = round(statistics.median(kept), 3)
    if alone := measured.laps.get("motet none", {}).get(Turn("none", 1)):
        reached = [decode_bandwidth(shape, "motet none", lap.decode) / (lap.limits or limits).bytes_per_s for lap in alone]
        found["b1_bandwidth_fraction"] = round(statistics.median(reached), 3)
    rates: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    shares: dict[str, Any] = {}
    for name, turn, rate in measured.cells():
        kind, batch = turn.kind, str(turn.batch)
        rates.setdefault(name, {}).setdefault(kind, {})[batch] = round(rate, 1)
        wanted, weight_bytes = chosen(name, turn) or (), WEIGHT_BYTES[name]
        of_laps = []
        for lap in measured.laps[name][turn]:
            there = lap.limits or limits
            if weight_bytes != WEIGHT_BYTES["motet none"]:
                there = there.of_whole_numbers
            seconds = turn.batch * output_tokens / lap.whole
            of_laps.append(
                roofline.share(there, shape, wanted, prompt_tokens, output_tokens, seconds, weight_bytes=weight_bytes)
            )
        medians = {part.name: statistics.median(getattr(one, part.name) for one in of_laps) for part in fields(roofline.Share)}
        shares.setdefault(name, {}).setdefault(kind, {})[batch] = {part: round(value, 3) for part, value in medians.items()}
        if kind == "none":
            decode.setdefault(name, {})[batch] = round(measured.rate(name, turn, "decode") or 0.0, 1)
    if (ours := shares.get("motet none", {}).get("none", {}).get("32")) is not None:
        found["b32_limit_fraction"] = ours["limit"]
    same = {
        name: agreed
        for name in rates
        if name.endswith(" bf16")
        and (agreed := measured.agreement("motet none" if name.startswith("llama") else "motet again", name)) is not None
    }
    found |= {"tokens_per_s": rates, "decode_tokens_per_s": decode, "share_of_machine": shares}
    return found | ({"same_first_token": same} if same else {})


def decode_bandwidth(shape: Shape, name: str, steps_per_s: float) -> float:
    """Bytes of weights per second. A step reads all weights except the token embedding, in ours and in llama.cpp."""
    head = 1.0 if name == "motet int4" else WEIGHT_BYTES[name]
    layers = shape.layer_weights()
    return (WEIGHT_BYTES[name] * layers + head * shape.hidden * shape.vocabulary) * steps_per_s


def show(title: str, found: dict[str, Any]) -> str:
    """One table: a row for each contestant and kind, rates with their share of the machine's limit."""
    words = {"none": "no adapter", "one": "one for all", "each": "one each"}
    rows: list[list[object]] = []
    for kind in KINDS:
        for name, kinds in found["tokens_per_s"].items():
            rates, shares = kinds.get(kind), found["share_of_machine"][name].get(kind, {})
            if rates is None:
                rows += [[LABELS[name], words[kind], "cannot"]] if name.startswith("llama") else []
                continue
            row: list[object] = [LABELS[name], words[kind]]
            for batch in map(str, BATCHES):
                row += [rates[batch], f"{shares[batch]['limit']:.0%}"] if batch in rates else ["", ""]
            rows.append(row)
    rows = [row + [""] * (2 + 2 * len(BATCHES) - len(row)) for row in rows]
    columns = ["", "adapters", *(word for batch in BATCHES for word in (f"{batch} at once", "of the limit"))]
    return report.table(title, columns, rows)
