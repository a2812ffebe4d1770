"""Throughput with many adapters on a CPU: Motet's engine beside vLLM and transformers + PEFT, with the same files.

    python -m bench engine --model M|S      offline: 32 requests of 64 + 64 tokens at once, greedy, to their full length
        base    no LoRA            one   one adapter for all        16, 32   as many adapters of mixed ranks in turn
        b1      one request, no LoRA
    python -m bench engine --serve          over HTTP, see bench.engine_serve
    python -m bench engine --bits           weights of 16, 8 and 4 bits, with `--peers llama.cpp` beside it: bench.engine_bits
    python -m bench engine --peers llama.cpp,vllm,peft      --bits with llama.cpp, then the first with vLLM and PEFT

Every contestant has a process of its own for the whole bench and the same cores. Each round runs all of them in each
configuration, in another order and with new prompts; figures are ratios of medians over the rounds. For "vLLM without LoRA" the
engine is started with LoRA off, because only then does vLLM compile its model. Its LoRA path is not compiled, so a ratio to it
says little. Therefore every rate is also given as a share of the machine's limit (bench.roofline).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any

from bench import report, roofline, vllm_peer
from bench.engine_parent import Contestant, Lap
from bench.mesh_parts import prompts
from bench.models import RANKS, SHAPES, model_and_adapters
from bench.watch import LIMIT_S, Watch

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 64
POPULAR = 2  # the adapter that "one" uses, of rank 32
ROUNDS = 3
KV_GIB = 1
PEERS = ("llama.cpp", "vllm", "peft")
BASES = ("base", "b1")
WEIGHT_BYTES = {"none": 2.0, "int8": 1.0, "int4": 9 / 16}

Measured = Mapping[tuple[str, str], Sequence[Lap]]
"""{(contestant, configuration): its laps}."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What one lap asks for: the adapter of each request, -1 for none."""

    name: str
    shown: str
    adapters: tuple[int, ...]


CONFIGURATIONS = (
    Configuration("base", "no LoRA", (-1,) * REQUESTS),
    Configuration("one", "1 adapter", (POPULAR,) * REQUESTS),
    Configuration("16", "16 adapters", tuple(i % 16 for i in range(REQUESTS))),
    Configuration("32", "32 adapters", tuple(range(REQUESTS))),
    Configuration("b1", "no LoRA, batch 1", (-1,)),
)
WARM_UP = tuple(c for c in CONFIGURATIONS if c.name in (*BASES, "32"))  # the others have nothing new


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--model", choices=sorted(SHAPES), default="M", help="428M or 30M parameters")
    parser.add_argument("--no-peers", action="store_true", help="without vLLM and PEFT, and without their figures")
    parser.add_argument("--peers", type=_peers, default=PEERS[1:], help=f"some of {','.join(PEERS)}")
    parser.add_argument("--bits", action="store_true", help="only the table of 16, 8 and 4 bits (bench.engine_bits)")
    parser.add_argument("--adapters", action="store_true", help="of that table: laps with adapters, too")
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none", help="of Motet's base weights")
    parser.add_argument("--serve", action="store_true", help="over HTTP instead of offline")


def _peers(text: str) -> tuple[str, ...]:
    """Names behind `--peers`. Raises ArgumentTypeError for an unknown one."""
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(PEERS)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(PEERS)}")
    return names


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    if args.serve:
        from bench.engine_serve import run_serve

        return run_serve(args)
    if not args.bits and "llama.cpp" not in args.peers:
        return _run_many(args)
    from bench.engine_bits import run_bits

    found = run_bits(args, peer="llama.cpp" in args.peers)
    if args.bits or args.peers == ("llama.cpp",):
        return found
    args.watch.limit_s += LIMIT_S  # for the other table
    return found | _run_many(args)


def _run_many(args: argparse.Namespace) -> dict[str, Any]:
    """The table of many adapters."""
    threads = len(os.sched_getaffinity(0))
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    tokens = 16 if args.quick else OUTPUT_TOKENS
    peers = () if args.no_peers else args.peers
    with _contestants(args.model, threads, args.quantization, peers) as contestants:
        rounds = 1 if args.quick else ROUNDS
        measured, limits = _rounds(contestants, args.model, rounds, tokens, args.watch)
        resident = {name: sides["lora"].rss_mib() for name, sides in contestants.items()}
    shares = _shares(measured, limits, args.model, tokens, args.quantization)
    _show(args.model, tokens, measured, shares)
    print(
        f"The machine: {limits.bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s / 1e9:.0f} GFLOP/s in bfloat16,"
        f" {threads} threads"
    )
    asked = {"model": args.model, "quantization": args.quantization, "output_tokens": tokens, "rounds": rounds}
    machine = {"gb_per_s": round(limits.bytes_per_s / 1e9, 1), "gflop_per_s": round(limits.flops_per_s / 1e9)}
    rounded = {
        name: {c.name: {k: round(v, 3) for k, v in asdict(shares[name, c.name]).items()} for c in CONFIGURATIONS}
        for name in contestants
    }
    return asked | figures(measured) | {"rss_mib": resident, "machine_limits": machine, "share_of_machine": rounded}


Sides = dict[str, Contestant]
"""One contestant's processes: "base" for laps without LoRA, "lora" for those with; often the same."""


@contextmanager
def _contestants(model: str, threads: int, quantization: str, peers: Sequence[str]) -> Iterator[dict[str, Sides]]:
    directory, adapter_dirs = model_and_adapters(model)
    adapters = [str(path) for path in adapter_dirs]
    size_mib = sum((path / "adapter_model.safetensors").stat().st_size for path in adapter_dirs) >> 20
    setup = {"model": str(directory), "adapters": adapters, "threads": threads, "kv_gib": KV_GIB, "max_rank": max(RANKS)}
    setup |= {"lora_mib": size_mib + 16, "quantization": quantization}
    with ExitStack() as stack:

        def start(name: str, python: str, environment: dict[str, str], **changes: Any) -> Contestant:
            print(f"starting {name}", file=sys.stderr)
            return stack.enter_context(Contestant(name, [python, "-m", f"bench.engine_{name}"], setup | changes, environment))

        environment = os.environ | {"PYTHONPATH": str(vllm_peer.ROOT)}
        motet = start("motet", sys.executable, environment)
        contestants = {"motet": {"base": motet, "lora": motet}}
        if "vllm" in peers:
            python, of_vllm = vllm_peer.python(), vllm_peer.environment(KV_GIB)
            contestants["vllm"] = {
                "lora": start("vllm", python, of_vllm),
                "base": start("vllm", python, of_vllm, adapters=[]),
            }
        if "peft" in peers:
            peft = start("peft", sys.executable, environment)
            contestants["peft"] = {"base": peft, "lora": peft}
        yield contestants


def _rounds(
    contestants: dict[str, Sides], model: str, rounds: int, tokens: int, watch: Watch
) -> tuple[Measured, roofline.Limits]:
    """All laps, and the best that the probes reached between them.

    First laps of a few tokens warm up (load every adapter, compile) and are not counted.
    """
    measured: dict[tuple[str, str], list[Lap]] = {(name, c.name): [] for name in contestants for c in CONFIGURATIONS}
    threads = len(os.sched_getaffinity(0))
    best = roofline.probe(threads)
    turns = [(0, c) for c in WARM_UP] + [(number, c) for number in range(1, rounds + 1) for c in CONFIGURATIONS]
    order = list(contestants)
    for turn in watch.rounds(len(turns), "turns", at_least=len(WARM_UP) + len(CONFIGURATIONS)):
        number, configuration = turns[turn]
        asked = prompts(len(configuration.adapters), PROMPT_TOKENS, seed=100 * number + CONFIGURATIONS.index(configuration))
        for name in order:
            side = contestants[name]["base" if configuration.name in BASES else "lora"]
            lap = side.lap(asked, configuration.adapters, tokens if number else 4)
            what = f"round {number} of {rounds}" if number else "warm-up"
            print(f"{what}: {name}, {configuration.shown}: {lap.seconds:.1f} s", file=sys.stderr)
            if number:
                measured[name, configuration.name].append(lap)
        order.append(order.pop(0))
        if configuration is CONFIGURATIONS[-1]:
            found = roofline.probe(threads)
            best = roofline.Limits(max(best.bytes_per_s, found.bytes_per_s), max(best.flops_per_s, found.flops_per_s))
    return measured, best


def rate(laps: Sequence[Lap]) -> float:
    """Output tokens per second, the median over the laps."""
    return statistics.median(lap.tokens_per_s for lap in laps)


def agreement(ours: Sequence[Lap], theirs: Sequence[Lap]) -> float:
    """The share of requests for which two contestants' first tokens are the same: 1 but for near-ties in bf16."""
    pairs = [(a[0], b[0]) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.outputs, y.outputs, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def figures(measured: Measured) -> dict[str, Any]:
    """The bench's figures, of the contestants there are; rates are output tokens per second."""
    rates = {key: rate(laps) for key, laps in measured.items()}
    names = list(dict.fromkeys(name for name, _ in measured))

    def ratio(ours: str, theirs: tuple[str, str]) -> float:
        return round(rates["motet", ours] / rates[theirs], 3)

    found = {"lora32_vs_own_base": ratio("32", ("motet", "base")), "lora_one_vs_own_base": ratio("one", ("motet", "base"))}
    if "vllm" in names:
        found["lora32_vs_vllm"] = ratio("32", ("vllm", "32"))
        found["base_vs_vllm"] = ratio("base", ("vllm", "base"))
        found["base_b1_vs_vllm"] = ratio("b1", ("vllm", "b1"))
    if "peft" in names:
        found["lora32_vs_peft"] = ratio("32", ("peft", "32"))
    by_name = {name: {c.name: round(rates[name, c.name], 1) for c in CONFIGURATIONS} for name in names}
    same = {
        name: {c.name: round(agreement(measured["motet", c.name], measured[name, c.name]), 3) for c in CONFIGURATIONS}
        for name in names[1:]
    }
    return found | {"tokens_per_s": by_name} | ({"same_first_token": same} if same else {})


def _shares(
    measured: Measured, limits: roofline.Limits, model: str, tokens: int, quantization: str
) -> dict[tuple[str, str], roofline.Share]:
    """{(contestant, configuration): its share of the machine}, of the median lap."""
    by_name = {c.name: c for c in CONFIGURATIONS}
    found = {}
    for (name, configuration), laps in measured.items():
        adapters = by_name[configuration].adapters
        seconds = len(adapters) * tokens / rate(laps)
        weight_bytes = WEIGHT_BYTES[quantization] if name == "motet" else WEIGHT_BYTES["none"]
        found[name, configuration] = roofline.share(
            limits, SHAPES[model], adapters, PROMPT_TOKENS, tokens, seconds, weight_bytes=weight_bytes
        )
    return found


def _show(model: str, tokens: int, measured: Measured, shares: Mapping[tuple[str, str], roofline.Share]) -> None:
    names = list(dict.fromkeys(name for name, _ in measured))
    base = {name: rate(measured[name, "base"]) for name in names}
    rows: list[list[object]] = []
    for configuration in CONFIGURATIONS:
        ours = rate(measured["motet", configuration.name])
        row: list[object] = [configuration.shown]
        for name in names:
            own = rate(measured[name, configuration.name])
            share = shares[name, configuration.name]
            row += [own, f"{own / base[name]:.2f}", *(f"{part:.0%}" for part in astuple(share))]
            if name != "motet":
                row.append(f"{ours / own:.2f}x")
                row.append(f"{agreement(measured['motet', configuration.name], measured[name, configuration.name]):.0%}")
        rows.append(row)
    parts = ["of bandwidth", "of FLOP/s", "of the limit"]
    columns = ["", "motet", "of its base", *parts]
    for name in names[1:]:
        columns += [name, "of its base", *parts, f"motet / {name}", "same first token"]
    title = f"{model}: output tokens/s, {REQUESTS} requests of {PROMPT_TOKENS} + {tokens} tokens"
    print(report.table(title, columns, rows))
