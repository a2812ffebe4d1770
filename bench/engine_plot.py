"""python -m bench.engine_plot FILE.svg: draws the last records of `bench engine --model M` for docs/speed.md."""

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
MANY = (("motet", "Motet"), ("vllm", "vLLM"), ("peft", "transformers + PEFT"))
ADAPTERS = {"base": 0, "one": 1, "16": 16, "32": 32}


def last(records: list[dict[str, Any]], contestant: str, rates: str) -> dict[str, Any]:
    """The last record of M in which the contestant has such rates. Raises ValueError when there is none."""
    for one in reversed(records):
        if one.get("model") == "M" and contestant in one.get(rates, {}):
            return one
    raise ValueError(f"no record of M has {contestant}: python -m bench engine --peers llama.cpp,vllm,peft")


def main() -> None:
    """Two plots beside each other: over the batch size, and over adapters."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from motet.twin.plots import COLORS, STYLE

    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    bits = last([one for one in records if "bits_lora_tokens_per_s" not in one], "llama q4_0", "bits_tokens_per_s")
    one, many = last(records, "llama bf16", "bits_lora_tokens_per_s"), last(records, "vllm", "tokens_per_s")
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.2), layout="constrained")
        batches, adapters = figure.subplots(1, 2)
        for i, (name, label, line) in enumerate(BITS):
            rates = bits["bits_tokens_per_s"][name]
            batches.plot(BATCHES, [rates[str(n)] for n in BATCHES], line, marker="o", color=COLORS[i % 3], label=label)
        for (name, label), color in zip(MANY, COLORS[3:], strict=False):
            rates = many["tokens_per_s"][name]
            adapters.plot(list(ADAPTERS.values()), [rates[key] for key in ADAPTERS], marker="o", color=color, label=label)
        llama = one["bits_tokens_per_s"]["llama bf16"]["32"], one["bits_lora_tokens_per_s"]["llama bf16"]["one"]["32"]
        adapters.plot([0, 1], llama, "--", marker="o", color=COLORS[0], label="llama.cpp BF16 (one at most)")
        batches.set(title="tokens/s, no adapters", xlabel="requests at once", xscale="log", xticks=BATCHES, xticklabels=BATCHES)
        adapters.set(title="tokens/s, 32 requests, bfloat16", xlabel="adapters in the batch", xticks=list(ADAPTERS.values()))
        for axes in (batches, adapters):
            axes.set_ylim(bottom=0.0)
            axes.minorticks_off()
            axes.legend(frameon=False)
        figure.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
