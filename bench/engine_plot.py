"""python -m bench.engine_plot FILE.svg: draws the last records of M beside llama.cpp (bench.engine_bits) for docs/speed.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.engine_bits import BATCHES

RECORDS = Path(__file__).parent / "results" / "engine.jsonl"
BITS = (
    ("motet none", "Motet bf16", "-"),
    ("motet int8", "Motet int8", "-"),
    ("motet int4", "Motet int4", "-"),
    ("llama bf16", "llama.cpp BF16", "--"),
    ("llama q8_0", "llama.cpp Q8_0", "--"),
    ("llama q4_0", "llama.cpp Q4_0", "--"),
)
ADAPTERS = ("no adapter", "one", "32")


def last(*, adapters: bool) -> dict[str, Any]:
    """The last record of M beside llama.cpp. Raises ValueError when there is none."""
    for one in reversed([json.loads(line) for line in RECORDS.read_text().splitlines()]):
        rates, adapted = one.get("bits_tokens_per_s", {}), one.get("bits_lora_tokens_per_s", {})
        if one["model"] == "M" and "llama q4_0" in (adapted if adapters else rates) and bool(adapted) == adapters:
            return one
    raise ValueError("no record of M beside llama.cpp: python -m bench engine --model M --peers llama.cpp")


def main() -> None:
    """Two plots beside each other: over the batch size, and with adapters."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from motet.twin.plots import COLORS, STYLE

    plain, lora = last(adapters=False), last(adapters=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        batches, adapters = figure.subplots(1, 2)
        for i, (name, label, line) in enumerate(BITS):
            look = {"marker": "o", "color": COLORS[i % 3], "label": label}
            rates = plain["bits_tokens_per_s"][name]
            batches.plot(BATCHES, [rates[str(n)] for n in BATCHES], line, **look)
            each = [
                lora["bits_tokens_per_s"][name],
                *(lora["bits_lora_tokens_per_s"][name].get(k, {}) for k in ("one", "each")),
            ]
            found = [rates["32"] for rates in each if "32" in rates]
            adapters.plot(ADAPTERS[: len(found)], found, line, **look)
        batches.set(title="tokens/s, no adapters", xlabel="requests at once", xscale="log", xticks=BATCHES, xticklabels=BATCHES)
        adapters.set(title="tokens/s, 32 requests", xlabel="adapters in the batch")
        for axes in (batches, adapters):
            axes.set_ylim(bottom=0.0)
            axes.minorticks_off()
        batches.legend(frameon=False)
        figure.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
