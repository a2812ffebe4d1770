"""`python -m bench engine`: output tokens/s on a CPU, beside llama.cpp, vLLM and transformers + PEFT with the same weights.

    python -m bench engine --model M|S      1, 8 and 32 requests of 64 + 64 tokens at once, greedy, to their full length
        none    without adapters
        one     one adapter for all requests
        each    an adapter of its own for each request, of mixed ranks; llama.cpp cannot
    python -m bench engine --peers llama.cpp,vllm,peft      beside all peers, twenty minutes; --no-peers: Motet alone
    python -m bench engine --serve                over HTTP, see bench.engine_serve

Motet's weights have 16, 8 and 4 bits, llama.cpp's too (BF16, Q8_0, Q4_0), vLLM's and PEFT's 16. Beside every rate stands its
share of what the machine allows just before and after the lap (bench.roofline): reading, or products of bfloat16 or, with 8 and
4 bits, of whole numbers.

Every contestant has a process of its own and the same cores. A turn asks each of them for one cell of the table, in another
order every time and with prompts that none has seen; a figure is the median over the rounds of the ratio of two laps. Memory
does not hold all contestants at once: vLLM and PEFT come after the others, beside Motet again ("motet again"), within ten more
minutes.

vLLM without LoRA is an engine in which LoRA is off: only then does vLLM compile its model. Its LoRA path is not compiled, so
a ratio to it says little.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import ROOT, llama_peer, roofline, vllm_peer
from bench.engine_parent import Contestant, Lap, contestant
from bench.engine_table import Measured, Turn, figures, show, timed
from bench.models import RANKS, SHAPES, model_and_adapters, prompts
from bench.watch import LIMIT_S, Watch

POPULAR = 2  # the adapter that "one" uses, of rank 32
PROMPT_TOKENS, OUTPUT_TOKENS, QUICK_TOKENS = 64, 64, 16
ROUNDS = 3
KV_GIB = 1
PEERS = ("llama.cpp", "vllm", "peft")
WARM_UP = (Turn("none", 1), Turn("none", 32), Turn("each", 32))
TURNS = (
    *(Turn("none", batch) for batch in (1, 8, 32)),
    *(Turn(kind, 32) for kind in ("one", "each")),
    *(Turn("one", 1), Turn("each", 8), Turn("one", 8)),  # left out where time is short
)
LEAST = len(WARM_UP) + 5


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="M", help="428M or 30M parameters")
    parser.add_argument("--no-peers", action="store_true", help="without peers, and without their figures")
    parser.add_argument(
        "--peers", type=_peers, default=PEERS[:1], help=f"some of {','.join(PEERS)}; the last two take ten more minutes"
    )
    parser.add_argument("--serve", action="store_true", help="over HTTP instead of offline")
    parser.add_argument(
        "--quantization", choices=["none", "int8", "int4"], default="none", help="of Motet's base weights, with --serve"
    )


def _peers(text: str) -> tuple[str, ...]:
    """Names behind `--peers`. Raises ArgumentTypeError for an unknown one."""
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(PEERS)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(PEERS)}")
    return names


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    if args.serve:
        from bench.engine_serve import run_serve

        return run_serve(args)
    threads = len(os.sched_getaffinity(0))
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    rounds, tokens = (1, QUICK_TOKENS) if args.quick else (ROUNDS, OUTPUT_TOKENS)
    best, measured = roofline.probe(threads), Measured()
    resident: dict[str, float] = {}
    for number, names in enumerate(groups(() if args.no_peers else args.peers)):
        if number:
            args.watch.limit_s += LIMIT_S
        with _contestants(args.model, names, threads) as contestants:
            best = best.better(_rounds(contestants, measured, rounds, tokens, args.watch))
            resident |= {name: max(side.process.rss_mib()[0] for side in sides.values()) for name, sides in contestants.items()}
    found = figures(measured, SHAPES[args.model], best, PROMPT_TOKENS, tokens, chosen)
    print(show(f"{args.model}: output tokens/s, requests of {PROMPT_TOKENS} + {tokens} tokens", found))
    machine = {"gb_per_s": round(best.bytes_per_s / 1e9, 1), "gflop_per_s": round(best.flops_per_s / 1e9)}
    machine["whole_gop_per_s"] = round(best.of_whole_numbers.flops_per_s / 1e9)
    print(
        f"The machine: {machine['gb_per_s']} GB/s, {machine['gflop_per_s']} GFLOP/s in bfloat16,"
        f" {machine['whole_gop_per_s']} GOP/s in 8 bits, {threads} threads"
    )
    return {"model": args.model, "output_tokens": tokens, "machine_limits": machine, "rss_mib": resident} | found


def groups(peers: Sequence[str]) -> list[list[str]]:
    """The contestants that run side by side, by name."""
    motet = [f"motet {width}" for width in ("none", "int8", "int4")]
    beside = [f"llama {width}" for width in llama_peer.WIDTHS] if "llama.cpp" in peers else []
    after = [f"{name} bf16" for name in ("vllm", "peft") if name in peers]
    return [[*motet, *beside], *([["motet again", *after]] if after else [])]


def chosen(name: str, turn: Turn) -> list[int] | None:
    """The adapter of each request of a turn, -1 for none; None if the contestant cannot run this turn."""
    if turn.kind == "each":
        return None if name.startswith("llama") else list(range(turn.batch))
    return [POPULAR if turn.kind == "one" else -1] * turn.batch


Sides = dict[str, Contestant]
"""One contestant's processes: "base" for laps without LoRA, "lora" for those with; often the same."""


@contextmanager
def _contestants(model: str, names: Sequence[str], threads: int) -> Iterator[dict[str, Sides]]:
    directory, adapters = model_and_adapters(model)
    size_mib = sum((path / "adapter_model.safetensors").stat().st_size for path in adapters) >> 20
    common = {"model": str(directory), "threads": threads, "kv_gib": KV_GIB, "max_rank": max(RANKS), "lora_mib": size_mib + 16}
    with ExitStack() as stack:

        def start(name: str, python: str, environment: dict[str, str], **setup: Any) -> Contestant:
            print(f"starting {name}", file=sys.stderr)
            module = f"bench.engine_{name.split()[0]}"
            given = common | {"adapters": [str(path) for path in adapters]} | setup
            return stack.enter_context(contestant(name, [python, "-m", module], given, environment))

        def sides(name: str) -> Sides:
            system, width = name.split()
            ours = os.environ | {"PYTHONPATH": str(ROOT)}
            match system:
                case "motet":
                    one = start(name, sys.executable, ours, quantization="none" if width == "again" else width)
                case "llama":
                    one = start(name, llama_peer.python(), llama_peer.environment(), **_llama_files(directory, adapters, width))
                case "peft":
                    one = start(name, sys.executable, ours)
                case _:
                    python, of_vllm = vllm_peer.python(), vllm_peer.environment(KV_GIB)
                    return {"lora": start(name, python, of_vllm), "base": start(name, python, of_vllm, adapters=[])}
            return {"base": one, "lora": one}

        yield {name: sides(name) for name in names}


def _llama_files(directory: Path, adapters: Sequence[Path], width: str) -> dict[str, str]:
    return {
        "file": str(llama_peer.files(directory)[width]),
        "adapter": str(llama_peer.adapter(directory, adapters[POPULAR])),
    }


def _rounds(contestants: dict[str, Sides], measured: Measured, rounds: int, tokens: int, watch: Watch) -> roofline.Limits:
    """Run all laps of one group into `measured`. Returns the best rates that the probes between them reached.

    First laps of a few tokens warm up (load every adapter, compile) and are not counted.
    """
    threads = len(os.sched_getaffinity(0))
    best = roofline.probe(threads)
    present = roofline.Present(threads, best)
    now = present()
    turns = [(0, turn) for turn in WARM_UP] + [(number, turn) for number in range(1, rounds + 1) for turn in TURNS]
    order = list(contestants)
    for at in watch.rounds(len(turns), f"turns of {order[-1]}'s table", at_least=LEAST):
        number, turn = turns[at]
        asked, first = (prompts(turn.batch, PROMPT_TOKENS, seed=1000 * number + 2 * TURNS.index(turn) + i) for i in range(2))
        for name in order:
            adapters = chosen(name, turn)
            if adapters is None:
                continue
            side = contestants[name]["base" if turn.kind == "none" else "lora"]
            alone = side.lap(first, adapters, 1) if number and turn.kind == "none" else None
            lap = side.lap(asked, adapters, tokens if number else 2)
            print(_said(name, turn, number, rounds, lap), file=sys.stderr)
            before, now = now, present()
            if number:
                measured.add(name, turn, timed(lap, alone, before.mean(now)))
        order.append(order.pop(0))
        if turn is TURNS[-1] or at == LEAST - 1:
            best = best.better(roofline.probe(threads))
    return best


def _said(name: str, turn: Turn, number: int, rounds: int, lap: Lap) -> str:
    what = f"round {number} of {rounds}" if number else "warm-up"
    return f"{what}: {name}, {turn.batch} at once, adapters {turn.kind}: {lap.seconds:.1f} s"
