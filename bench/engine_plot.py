"""python -m bench.engine_plot FILE.svg: draws the last record of M beside peers (bench.engine), for docs/speed.md.

Left: output tokens/s over the batch size without adapters. Right: of 32 requests, over the number of distinct adapters. Every
contestant of the record is drawn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.engine_table import BATCHES, KINDS, LABELS

RECORDS = Path(__file__).parent / "results" / "engine.jsonl"
ADAPTERS = dict(zip(KINDS, ("no adapter", "one", "32"), strict=True))
LINES = {"motet": "-", "llama": "--", "vllm": ":", "peft": "-."}
WIDTHS = {"none": 0, "bf16": 0, "int8": 1, "q8_0": 1, "int4": 2, "q4_0": 2}  # the color of each
UNSEEN = "motet again"


def last(lines: Iterable[str]) -> dict[str, Any]:
    """The rates of the last record of M beside a peer. Raises ValueError if there is none.

    {contestant: {"none", "one" or "each": {requests at once: tokens/s}}}
    """
    for line in reversed(list(lines)):
        record = json.loads(line)
        rates: dict[str, Any] = record.get("tokens_per_s", {})
        if record["model"] == "M" and "motet none" in rates and any(not name.startswith("motet") for name in rates):
            return rates
    raise ValueError("no record of M beside peers: python -m bench engine --model M")


def draw(rates: dict[str, Any], path: Path) -> None:
    """Write the two plots side by side."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from motet.twin.plots import COLORS, STYLE

    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        batches, adapters = figure.subplots(1, 2)
        for name in (name for name in LABELS if name in rates and name != UNSEEN):
            system, width = name.split()
            color = COLORS[WIDTHS[width]]
            look = {"marker": "o", "color": color, "linestyle": LINES[system], "label": LABELS[name]}
            plain = rates[name].get("none", {})
            found = [(batch, plain[str(batch)]) for batch in BATCHES if str(batch) in plain]
            batches.plot(*zip(*found, strict=True), **look)
            each = [(ADAPTERS[kind], rates[name][kind]["32"]) for kind in KINDS if "32" in rates[name].get(kind, {})]
            adapters.plot(*zip(*each, strict=True), **look)
        batches.set(title="tokens/s, no adapters", xlabel="requests at once", xscale="log", xticks=BATCHES, xticklabels=BATCHES)
        adapters.set(title="tokens/s, 32 requests", xlabel="adapters in the batch")
        for axes in (batches, adapters):
            axes.set_ylim(bottom=0.0)
            axes.minorticks_off()
        figure.legend(*batches.get_legend_handles_labels(), loc="outside right center", frameon=False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(last(RECORDS.read_text().splitlines()), Path(sys.argv[1]))
