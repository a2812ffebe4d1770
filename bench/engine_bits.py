"""`python -m bench engine --bits`: base weights of 16, 8 and 4 bits; beside llama.cpp's with `--peers llama.cpp`.

Requests of 64 + 64 tokens, 1, 8 and 32 at once, greedy. Every contestant is a process that has loaded one width: Motet's bf16,
int8, int4, llama.cpp's BF16, Q8_0, Q4_0. Some laps generate all tokens, others only the first ones. The difference is the time
of decoding alone; its share of the bandwidth counts the weights once per step.

With `--adapters` there are also laps with adapters, for 1 and 32 requests only: one adapter for all requests, and with Motet a
different one for each request, which llama.cpp cannot do.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench import llama_peer, report, roofline
from bench.engine import POPULAR, WEIGHT_BYTES
from bench.engine_parent import Contestant, Lap
from bench.mesh_parts import prompts
from bench.models import RANKS, SHAPES, Shape, model_and_adapters
from bench.vllm_peer import ROOT
from bench.watch import Watch

BATCHES, BATCHES_WITH_ADAPTERS = (1, 8, 32), (1, 32)
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
ROUNDS = 4
KV_GIB = 0.5
LLAMA_BYTES = {"bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a weight


@dataclass(frozen=True, slots=True)
class Timed:
    """Output tokens per second of one lap: all of it, and without the prompts and the first token of each request."""

    whole: float
    decode: float


@dataclass(frozen=True, slots=True)
class Laps:
    """Which laps there are."""

    batches: Sequence[int]
    adapters: bool
    rounds: int
    tokens: int


Measured = Mapping[tuple[str, int], Sequence[Timed]]
"""{(contestant, requests at once): its laps without adapters}."""
Adapted = Mapping[tuple[str, str, int], Sequence[float]]
"""{(contestant, "one" or "each", requests at once): output tokens per second of its laps}."""


def run_bits(args: Any, *, peer: bool) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    threads = len(os.sched_getaffinity(0))
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    tokens = 16 if args.quick else OUTPUT_TOKENS
    batches = BATCHES_WITH_ADAPTERS if args.adapters else BATCHES
    laps = Laps(batches, args.adapters, 1 if args.quick else ROUNDS, tokens)
    with _contestants(args.model, threads, peer=peer) as contestants:
        measured, adapted, limits, same = _rounds(contestants, laps, args.watch)
    shape, names = SHAPES[args.model], list(contestants)
    rows: list[list[object]] = []
    for name in names:
        row: list[object] = [name]
        for batch in batches:
            whole, decode = median(measured[name, batch], "whole"), median(measured[name, batch], "decode")
            row += [whole, decode, f"{decode_bandwidth(shape, name, decode / batch) / limits.bytes_per_s:.0%}"]
        rows.append(row)
    columns = ["", *(word for batch in batches for word in (f"{batch} at once", "decoding", "of bandwidth"))]
    print(report.table(f"{args.model}: output tokens/s, {PROMPT_TOKENS} + {tokens} tokens", columns, rows))
    if adapted:
        print(_with_adapters(args.model, measured, adapted))
    machine = {"gb_per_s": round(limits.bytes_per_s / 1e9, 1), "gflop_per_s": round(limits.flops_per_s / 1e9)}
    print(f"The machine: {machine['gb_per_s']} GB/s, {machine['gflop_per_s']} GFLOP/s in bfloat16, {threads} threads")
    asked = {"model": args.model, "bits": True, "output_tokens": tokens, "machine_limits": machine}
    found = asked | figures(measured, shape, limits) | ({"bits_lora_tokens_per_s": _by_name(adapted)} if adapted else {})
    return found | ({"same_first_token_as_llama_bf16": same} if peer else {})


def _with_adapters(model: str, measured: Measured, adapted: Adapted) -> str:
    """Rates with adapters, and their share of the same contestant's rate without."""
    rows: list[list[object]] = []
    names = list(dict.fromkeys(name for name, _ in measured))
    kinds = {(name, kind) for name, kind, _ in adapted}
    for name, kind in sorted(kinds, key=lambda one: (one[1] == "each", names.index(one[0]))):
        row: list[object] = [name, "the same for all" if kind == "one" else "one each"]
        for batch in BATCHES_WITH_ADAPTERS:
            laps = adapted.get((name, kind, batch))
            rate = statistics.median(laps) if laps else None
            row += ["", ""] if rate is None else [rate, f"{rate / median(measured[name, batch], 'whole'):.2f}"]
        rows.append(row)
    columns = ["", "adapter", *(word for batch in BATCHES_WITH_ADAPTERS for word in (f"{batch} at once", "of no LoRA"))]
    return report.table(f"{model}: the same with adapters", columns, rows)


def _by_name(adapted: Adapted) -> dict[str, dict[str, dict[str, float]]]:
    """{contestant: {"one" or "each": {requests at once: output tokens per second}}}."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (name, kind, batch), laps in adapted.items():
        found.setdefault(name, {}).setdefault(kind, {})[str(batch)] = round(statistics.median(laps), 1)
    return found


@contextmanager
def _contestants(model: str, threads: int, *, peer: bool) -> Iterator[dict[str, Contestant]]:
    directory, adapters = model_and_adapters(model)
    files = llama_peer.files(directory) if peer else {}
    size_mib = sum((path / "adapter_model.safetensors").stat().st_size for path in adapters) >> 20
    common = {"model": str(directory), "threads": threads, "kv_gib": KV_GIB, "max_rank": max(RANKS), "lora_mib": size_mib + 16}
    common |= {"adapters": [str(path) for path in adapters]}
    with ExitStack() as stack:

        def start(name: str, python: str, module: str, setup: dict[str, Any], environment: dict[str, str]) -> Contestant:
            print(f"starting {name}", file=sys.stderr)
            return stack.enter_context(Contestant(name, [python, "-m", f"bench.{module}"], common | setup, environment))

        ours, theirs = os.environ | {"PYTHONPATH": str(ROOT)}, llama_peer.environment()
        found = {}
        for width in WEIGHT_BYTES:
            name = f"motet {width}"
            found[name] = start(name, sys.executable, "engine_motet", {"quantization": width}, ours)
        for width, file in files.items():
            name = f"llama {width}"
            adapter = llama_peer.adapter(directory, adapters[POPULAR])
            found[name] = start(name, llama_peer.python(), "engine_llama", {"file": str(file), "adapter": str(adapter)}, theirs)
        yield found


def _rounds(
    contestants: dict[str, Contestant], laps: Laps, watch: Watch
) -> tuple[Measured, Adapted, roofline.Limits, float | None]:
    """Laps in turns after one of each to warm up; the best that the probes reached; and how often first tokens agree."""
    measured: dict[tuple[str, int], list[Timed]] = {(name, batch): [] for name in contestants for batch in laps.batches}
    adapted: dict[tuple[str, str, int], list[float]] = {}
    threads, order = len(os.sched_getaffinity(0)), list(contestants)
    best = roofline.probe(threads)
    first: dict[str, list[int]] = {name: [] for name in contestants}
    for number in watch.rounds(1 + laps.rounds, "rounds", at_least=2):
        tokens = laps.tokens if number else 2
        for batch in laps.batches:
            asked, short, other = (prompts(batch, PROMPT_TOKENS, seed=1000 * number + 3 * batch + i) for i in range(3))
            for name in order:
                contestant = contestants[name]
                alone = contestant.lap(short, [-1] * batch, 1)
                whole = contestant.lap(asked, [-1] * batch, tokens)
                with_adapters = _chosen(name, batch) if laps.adapters else []
                found = [(kind, contestant.lap(other, chosen, tokens)) for kind, chosen in with_adapters]
                if number:
                    measured[name, batch].append(timed(whole, alone.seconds))
                    for kind, lap in found:
                        adapted.setdefault((name, kind, batch), []).append(lap.tokens_per_s)
                    first[name] += [output[0] for lap in (whole, *(lap for _, lap in found[:1])) for output in lap.outputs]
        order.append(order.pop(0))
        probed = roofline.probe(threads)
        best = roofline.Limits(max(best.bytes_per_s, probed.bytes_per_s), max(best.flops_per_s, probed.flops_per_s))
        print(f"round {number} of {laps.rounds}", file=sys.stderr)
    if "llama bf16" not in first:
        return measured, adapted, best, None
    pairs = list(zip(first["motet none"], first["llama bf16"], strict=True))
    return measured, adapted, best, round(sum(a == b for a, b in pairs) / len(pairs), 3)


def _chosen(name: str, batch: int) -> list[tuple[str, list[int]]]:
    """(kind, the adapter of each request) of a contestant's laps with adapters."""
    one = ("one", [POPULAR] * batch)
    return [one, ("each", list(range(batch)))] if name.startswith("motet") and batch > 1 else [one]


def timed(whole: Lap, first_s: float) -> Timed:
    """`first_s` is what a lap of one token took."""
    after_first = sum(len(output) - 1 for output in whole.outputs)
    return Timed(whole.tokens_per_s, after_first / max(whole.seconds - first_s, 1e-9))


def median(laps: Sequence[Timed], part: str) -> float:
    """Of one of their two rates."""
    return statistics.median(getattr(lap, part) for lap in laps)


def decode_bandwidth(shape: Shape, name: str, steps_per_s: float) -> float:
    """Bytes of weights per second: a step reads all but the embedding of tokens, llama.cpp's and ours the same."""
    width = name.split()[1]
    each = (WEIGHT_BYTES | LLAMA_BYTES)[width]
    head = 1.0 if width == "int4" else each
    layers = sum(out * into for out, into in shape.projections().values()) * shape.layers
    return (each * layers + head * shape.hidden * shape.vocabulary) * steps_per_s


def figures(measured: Measured, shape: Shape, limits: roofline.Limits) -> dict[str, Any]:
    """The bench's figures, of the contestants there are."""
    names = list(dict.fromkeys(name for name, _ in measured))
    rates = {key: median(laps, "whole") for key, laps in measured.items()}
    step = median(measured["motet none", 1], "decode")
    found: dict[str, Any] = {
        "int8_b1_vs_bf16": rates["motet int8", 1] / rates["motet none", 1],
        "int8_b32_vs_bf16": rates["motet int8", 32] / rates["motet none", 32],
        "b1_bandwidth_fraction": decode_bandwidth(shape, "motet none", step) / limits.bytes_per_s,
    }
    if "llama bf16" in names:
        found["b1_vs_llama_bf16"] = rates["motet none", 1] / rates["llama bf16", 1]
        found["b1_int4_vs_llama_q4"] = rates["motet int4", 1] / rates["llama q4_0", 1]
        found["b32_vs_llama_bf16"] = rates["motet none", 32] / rates["llama bf16", 32]
    found = {name: round(value, 3) for name, value in found.items()}
    batches = sorted({batch for _, batch in measured})
    each = {name: {str(batch): round(rates[name, batch], 1) for batch in batches} for name in names}
    decode = {name: {str(batch): round(median(measured[name, batch], "decode"), 1) for batch in batches} for name in names}
    return found | {"bits_tokens_per_s": each, "bits_decode_tokens_per_s": decode}
