"""`python -m bench vllm_lora`: vLLM with LoRA, the same with Motet's plug-in, and vLLM without LoRA, in turns, beside Motet.

    --model M|S     32 requests at once of 64 + 32 tokens, greedy, without adapters and with 1, 8 and 32
        mixed       adapters of ranks 8, 16, 32, 64 in turn; one in four has the MLP's modules too
        one rank    adapters of rank 32
    afterwards      64 adapters of ranks 8 to 64 of the smaller model, in float32: requests whose tokens the plug-in changes
                    (`differences`), and bytes of slots over vLLM's (`adapter_memory_vs_vllm`)

Needs vLLM and Motet in one environment: `make vllm`. vLLM alone takes minutes for a lap of M, so its cells are measured once,
and only those that the figures need; the others are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import ROOT, report, vllm_peer
from bench.engine_parent import Contestant, contestant
from bench.models import RANKS, SHAPES, model_and_adapters, prompts

PROMPT_TOKENS, OUTPUT_TOKENS, QUICK_TOKENS = 64, 32, 4
REQUESTS = 32
ROUNDS = 3
KV_GIB = 1
STEP_TOKENS = 512  # vLLM alone would gather gigabytes of adapters for more
OF_ONE_RANK = 2  # the first of the adapters of rank 32
ALONE, PLUGGED, BASE, NATIVE = "vLLM", "vLLM with the plug-in", "vLLM without LoRA", "Motet"
Cell = tuple[str, int]
"""("mixed" or "one rank", adapters); without adapters ("none", 0)."""
CELLS: tuple[Cell, ...] = (("none", 0), ("mixed", 1), ("mixed", 8), ("mixed", 32), ("one rank", 8), ("one rank", 32))
COMPARED: tuple[Cell, ...] = (("mixed", 1), ("mixed", 32))
MEMORY_ADAPTERS, MEMORY_PROMPT, MEMORY_TOKENS = 64, 8, 6
PROCESS_S = 1200.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="M", help="428M or 30M parameters")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    try:
        vllm_peer.environment(KV_GIB)
    except vllm_peer.PeerMissing as missing:
        raise SystemExit(f"vllm_lora: {missing}; `make vllm` installs vLLM and Motet together") from None
    rounds, tokens = (1, QUICK_TOKENS) if args.quick else (ROUNDS, OUTPUT_TOKENS)
    rates: dict[tuple[str, Cell], list[float]] = defaultdict(list)
    with contestants(args.model) as sides:
        for side in sides.values():  # load every adapter, and compile
            for cell in CELLS:
                if runs(side.name, cell):
                    side.lap(prompts(REQUESTS, 4, seed=CELLS.index(cell)), numbers(cell), 1)
        order = list(sides)
        for number in args.watch.rounds(rounds, "rounds"):
            for at, cell in enumerate(CELLS):
                asked = prompts(REQUESTS, PROMPT_TOKENS, seed=100 * (number + 1) + at)
                for name in order:
                    if runs(name, cell) and (name != ALONE or (number == 0 and cell in COMPARED)):
                        lap = sides[name].lap(asked, numbers(cell), tokens)
                        rates[name, cell].append(lap.tokens_per_s)
                        print(f"round {number + 1}: {name}, {cell[0]} {cell[1]}: {lap.seconds:.1f} s", file=sys.stderr)
                order.append(order.pop(0))
        resident = {name: side.process.rss_mib()[0] for name, side in sides.items()}
    return told(args.model, tokens, rates, resident) | same_tokens_and_memory()


def runs(name: str, cell: Cell) -> bool:
    """Whether a contestant can run a cell: LoRA is on or off, and Motet holds an adapter once, whatever its names."""
    if name == NATIVE:
        return cell[0] != "one rank"
    return (cell == CELLS[0]) == (name == BASE)


def numbers(cell: Cell) -> list[int]:
    """The adapter of each request."""
    kind, count = cell
    first = REQUESTS if kind == "one rank" else 0
    return [first + request % count if count else -1 for request in range(REQUESTS)]


@contextmanager
def contestants(model: str) -> Iterator[dict[str, Contestant]]:
    """A process for each side."""
    directory, adapters = model_and_adapters(model)
    of_one_rank = adapters[OF_ONE_RANK :: len(RANKS)]
    paths = [*adapters, *(of_one_rank[i % len(of_one_rank)] for i in range(REQUESTS))]
    size_mib = sum((path / "adapter_model.safetensors").stat().st_size for path in adapters) >> 20
    common = {"model": str(directory), "threads": len(os.sched_getaffinity(0)), "kv_gib": KV_GIB, "max_rank": max(RANKS)}
    common |= {"lora_mib": size_mib + 16, "quantization": "none", "step_tokens": STEP_TOKENS}
    with ExitStack() as stack:

        def start(name: str, module: str, environment: dict[str, str], python: str, chosen: Sequence[Path]) -> Contestant:
            print(f"starting {name}", file=sys.stderr)
            setup = common | {"adapters": [str(path) for path in chosen]}
            return stack.enter_context(contestant(name, [python, "-m", module], setup, environment))

        def vllm(name: str, chosen: Sequence[Path], *, plugged: bool) -> Contestant:
            environment = vllm_peer.environment(KV_GIB, plugged=plugged)
            return start(name, "bench.engine_vllm", environment, vllm_peer.python(), chosen)

        yield {
            BASE: vllm(BASE, [], plugged=False),
            PLUGGED: vllm(PLUGGED, paths, plugged=True),
            ALONE: vllm(ALONE, paths, plugged=False),
            NATIVE: start(NATIVE, "bench.engine_motet", os.environ | {"PYTHONPATH": str(ROOT)}, sys.executable, adapters),
        }


def told(model: str, tokens: int, rates: dict[tuple[str, Cell], list[float]], resident: dict[str, int]) -> dict[str, Any]:
    """Print the table; the figures from it."""
    middle = {key: statistics.median(found) for key, found in rates.items()}
    rows: list[list[object]] = [
        [name, *(middle.get((name, cell), "") for cell in CELLS), resident[name]] for name in (BASE, ALONE, PLUGGED, NATIVE)
    ]
    columns = ["", *(f"{kind} {count}" if count else "no adapters" for kind, count in CELLS), "MiB"]
    title = f"{model}: output tokens/s, {REQUESTS} requests of {PROMPT_TOKENS} + {tokens} tokens at once"
    print(report.table(title, columns, rows))
    one, many = COMPARED
    prefix = model.lower()
    return {
        "model": model,
        "output_tokens": tokens,
        f"{prefix}32_vs_vllm_without_lora": round(middle[PLUGGED, many] / middle[BASE, CELLS[0]], 3),
        f"{prefix}32_vs_vllm_alone": round(middle[PLUGGED, many] / middle[ALONE, many], 2),
        f"{prefix}1_vs_vllm_alone": round(middle[PLUGGED, one] / middle[ALONE, one], 2),
        f"{prefix}32_vs_motet": round(middle[PLUGGED, many] / middle[NATIVE, many], 3),
        "tokens_per_s": {f"{name}, {kind} {count}": round(rate, 1) for (name, (kind, count)), rate in middle.items()},
        "rss_mib": resident,
    }


def same_tokens_and_memory() -> dict[str, Any]:
    """What 64 adapters of the smaller model take in slots, and how many of 64 requests get other tokens, in float32."""
    model, adapters = model_and_adapters("S")
    paths = [str(adapters[i % len(adapters)]) for i in range(MEMORY_ADAPTERS)]
    asked = [[prompt, number] for number, prompt in enumerate(prompts(MEMORY_ADAPTERS, MEMORY_PROMPT, seed=5))]
    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": MEMORY_ADAPTERS, "max_num_batched_tokens": 128}
    # one slot is empty, and nothing is compiled: the same sums in both
    options |= {"max_loras": MEMORY_ADAPTERS + 1, "max_cpu_loras": MEMORY_ADAPTERS + 1, "max_lora_rank": max(RANKS)}
    setup: dict[str, Any] = {"model": str(model), "adapters": paths, "options": options | {"enforce_eager": True}}
    setup["laps"] = [{"ask": asked, "tokens": MEMORY_TOKENS}]
    found = {}
    for plugged in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            result = Path(directory) / "found.json"
            done = subprocess.run(
                [vllm_peer.python(), "-W", "ignore", "-m", "bench.vllm_lora_process", str(result)],
                input=json.dumps(setup) + "\n",
                capture_output=True,
                text=True,
                timeout=PROCESS_S,
                env=vllm_peer.environment(KV_GIB, plugged=plugged),
            )
            if done.returncode:
                raise RuntimeError(f"bench.vllm_lora_process ended with {done.returncode}:\n{done.stderr[-3000:]}")
            found[plugged] = json.loads(result.read_text(encoding="utf-8"))
    changed = sum(a != b for a, b in zip(found[True]["laps"][0], found[False]["laps"][0], strict=True))
    mib = {name: round(found[plugged]["slot_bytes"] / 2**20, 1) for name, plugged in ((ALONE, False), (PLUGGED, True))}
    print(f"{MEMORY_ADAPTERS} adapters of ranks {RANKS[0]} to {RANKS[-1]}: slots take {mib} MiB; {changed} requests differ")
    ratio = found[True]["slot_bytes"] / found[False]["slot_bytes"]
    return {"adapter_memory_vs_vllm": round(ratio, 3), "slots_mib": mib, "differences": changed}
