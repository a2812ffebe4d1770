"""`python -m bench engine --serve`: latencies over HTTP with 32 adapters, of Motet's mesh and of vLLM's OpenAI server.

Both servers are started as their users start them, with the adapters given at the start and the same KV space:

    start     from the process's start to the first token of the base model, and of the last adapter; the median of some starts
    latency   1, 8 and 32 requests at once, each with the next adapter: TTFT and the time between tokens (ITL).
              Both servers are up, one is asked at a time, with the same prompts, in turns
    memory    resident size of the process that holds the model, when all this is done
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import ROOT, report, vllm_peer
from bench.models import ADAPTERS, RANKS, model_and_adapters, prompts
from bench.rig.http import BASE
from bench.rig.laps import Laps, lap_over_http
from bench.rig.server import Server, started_server
from bench.watch import Watch
from motet.cli.process import free_port

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
LAPS = {1: 16, 8: 4, 32: 3}  # by concurrency
QUICK_LAPS = {1: 2, 8: 1, 32: 1}
STARTS = 3
KV_GIB = 1


def motet_server(
    model: Path, adapters: Sequence[Path], data: Path, quantization: str = "none"
) -> AbstractContextManager[Server]:
    """`motet up`, every service its own process."""
    port = free_port()
    size_mib = sum((path / "adapter_model.safetensors").stat().st_size for path in adapters) >> 20
    argv = [sys.executable, "-m", "motet", "up", "--model", str(model), "--served-model-name", BASE, "--port", str(port)]
    argv += ["--adapters-dir", str(adapters[0].parent), "--data-dir", str(data), "--drain-s", "2"]
    argv += ["--quantization", quantization]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MOTET_KV_MEMORY_GIB": str(KV_GIB)}
    environment |= {"MOTET_LORA_MEMORY_MIB": str(size_mib + 16), "MOTET_MAX_LORA_RANK": str(max(RANKS))}
    return started_server("motet", argv, environment, port, adapters[-1].name)


def vllm_server(
    model: Path, adapters: Sequence[Path], *options: str, slots: int, name: str = "vllm"
) -> AbstractContextManager[Server]:
    """vLLM's OpenAI server with its best options (see vllm_peer) and further ones. `slots`: adapters at once."""
    port = free_port()
    argv = [vllm_peer.python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", BASE]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    # its own 4096 take as long for 32 prompts, show no first token before the last, and need 2.5 GiB more
    argv += ["--max-num-batched-tokens", "512", "--max-num-seqs", "64", "--disable-uvicorn-access-log"]
    argv += ["--enable-lora", "--max-loras", str(slots), "--max-cpu-loras", str(len(adapters))]
    argv += ["--max-lora-rank", str(max(RANKS)), "--lora-modules", *(f"{path.name}={path}" for path in adapters)]
    return started_server(name, [*argv, *options], vllm_peer.environment(KV_GIB), port, adapters[-1].name)


@dataclass(slots=True)
class Side:
    """The measurements of one server."""

    starts_s: list[float] = field(default_factory=list)
    adapter_starts_s: list[float] = field(default_factory=list)
    laps: dict[int, Laps] = field(default_factory=lambda: defaultdict(Laps))  # by concurrency
    rss_mib: tuple[int, int] = (0, 0)  # of the model's process, of all


def run_serve(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    model, adapters = model_and_adapters(args.model)
    laps, tokens, starts = (QUICK_LAPS, 16, 1) if args.quick else (LAPS, OUTPUT_TOKENS, STARTS)
    names = [path.name for path in adapters]
    sides: dict[str, Side] = {}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory, ExitStack() as stack:
        servers = []
        for name in ("motet",) if args.no_peers else ("motet", "vllm"):
            side = sides[name] = Side()
            for number in range(starts):
                print(f"starting {name} ({number + 1} of {starts})", file=sys.stderr)
                data = Path(directory) / f"data-{number}"
                if name == "motet":
                    starting = motet_server(model, adapters, data, args.quantization)
                else:
                    starting = vllm_server(model, adapters, slots=len(adapters))
                with ExitStack() as this_start:
                    started = this_start.enter_context(starting)
                    side.starts_s.append(started.first_token_s)
                    side.adapter_starts_s.append(started.first_adapter_token_s)
                    if number == starts - 1:  # the last one stays
                        stack.push(this_start.pop_all())
            servers.append(started)
        _latencies(servers, sides, laps, tokens, names, args.watch)
        for one in servers:
            sides[one.name].rss_mib = one.process.rss_mib()
    _show(args.model, tokens, sides)
    setup = {"model": args.model, "serve": True, "quantization": args.quantization, "output_tokens": tokens}
    return setup | figures(sides)


def _latencies(
    servers: list[Server], sides: dict[str, Side], laps: dict[int, int], tokens: int, names: list[str], watch: Watch
) -> None:
    for one in servers:  # every adapter once, so that none is loaded while time counts
        lap_over_http(one.port, prompts(ADAPTERS, PROMPT_TOKENS, seed=1), 2, names)
    for streams, count in laps.items():
        for number in watch.rounds(count, f"laps of {streams}"):
            asked = prompts(streams, PROMPT_TOKENS, seed=1000 * streams + number)
            first = number * streams
            models = [names[(first + i) % len(names)] for i in range(streams)]
            for one in servers if number % 2 else servers[::-1]:
                for other in servers:
                    other.settle()
                sides[one.name].laps[streams].append(lap_over_http(one.port, asked, tokens, models))


def figures(sides: dict[str, Side]) -> dict[str, Any]:
    """The bench's figures of these servers."""
    motet, vllm = sides["motet"], sides.get("vllm")
    most = max(motet.laps)
    found: dict[str, Any] = {f"itl_p50_ms_c{streams}": round(laps.itl_ms(0.5), 2) for streams, laps in motet.laps.items()}
    found["first_token_s"] = round(statistics.median(motet.starts_s), 2)
    if vllm is not None:
        found[f"ttft_c{most}_vs_vllm"] = round(motet.laps[most].ttft_ms(0.5) / vllm.laps[most].ttft_ms(0.5), 4)
        found["rss_vs_vllm"] = round(motet.rss_mib[0] / vllm.rss_mib[0], 3)
    for name, side in sides.items():
        found[name] = {
            "first_token_s": round(statistics.median(side.starts_s), 2),
            "first_adapter_token_s": round(statistics.median(side.adapter_starts_s), 2),
            "rss_mib": side.rss_mib[0],
            "rss_all_mib": side.rss_mib[1],
        }
        for streams, laps in side.laps.items():
            found[name] |= {f"ttft_p{p}_ms_c{streams}": round(laps.ttft_ms(p / 100), 2) for p in (50, 99)}
            found[name] |= {f"itl_p{p}_ms_c{streams}": round(laps.itl_ms(p / 100), 2) for p in (50, 99)}
    return found


def _show(model: str, tokens: int, sides: dict[str, Side]) -> None:
    rows: list[list[object]] = []
    for streams in sides["motet"].laps:
        for name, side in sides.items():
            laps = side.laps[streams]
            times = [measure(share) for measure in (laps.ttft_ms, laps.itl_ms) for share in (0.5, 0.99)]
            rows.append([f"{name}, {streams} at once", *times, laps.tokens_per_s])
    columns = ["", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "tokens/s"]
    print(report.table(f"{model}: {PROMPT_TOKENS} + {tokens} tokens over HTTP, {ADAPTERS} adapters", columns, rows))
    starts: list[list[object]] = [
        [name, statistics.median(side.starts_s), statistics.median(side.adapter_starts_s), *side.rss_mib]
        for name, side in sides.items()
    ]
    columns = ["", "first token s", "of an adapter s", "RSS MiB, model's process", "all processes"]
    print(report.table(f"Start and memory with {KV_GIB} GiB of KV space", columns, starts))
