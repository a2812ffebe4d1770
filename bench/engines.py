"""`python -m bench engines`: vLLM's own OpenAI server beside Motet over vLLM, in the same environment, with the same model,
adapters, KV space, slots and cores. Needs vLLM and Motet in one environment: `make vllm`.

    direct    as many adapters as slots, 1, 8 and 32 requests at once: TTFT and throughput. It shows the cost of Motet's
              gateway, bus and worker. Both servers are up and warm; they are measured in turns
    slots     32 adapters over 8 slots, Zipf popularity, Poisson arrivals at a share of the throughput just measured: TTFT and
              the time to the whole answer. vLLM alone has all adapters in host memory
    fault     kill -9 of vLLM's EngineCore in the middle of streams: the number of answers that are never completed

`--inside` compares a third server, vLLM's with Motet's scheduler inside. To save time, *direct* then has only 32 requests at
once, for the rate of arrivals, and *fault* is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report, vllm_peer
from bench.engine_serve import KV_GIB, PROMPT_TOKENS, vllm_server
from bench.models import RANKS, SHAPES, model_and_adapters, prompts
from bench.rig.arrivals import poisson
from bench.rig.http import BASE, completion, post
from bench.rig.laps import Laps, lap_over_http
from bench.rig.percentiles import quantile_ms
from bench.rig.requests import Request, play
from bench.rig.server import Server, started_server
from motet.cli.client import ApiError, Client
from motet.cli.process import free_port

SLOTS = 8
OUTPUT_TOKENS = 32
LAPS = {1: 12, 8: 6, 32: 4}  # by concurrency
QUICK_LAPS = {1: 2, 8: 1}
INSIDE_LAPS = {32: 2}
LOAD = 0.8  # of the direct server's throughput with as many adapters as slots
ARRIVALS, QUICK_ARRIVALS = 160, 24
ROUNDS = 2  # of arrivals, for each server
ZIPF = 1.0  # popularity of adapter i is 1 / i
STREAMS, STREAM_TOKENS = 8, 256
HEAL_S = 180.0
INSIDE = ("--scheduler-cls", "bench.engines_inside.Turns", "--block-size", "32")
PATIENT_MS = "3600000"  # vLLM refuses nothing for being late, so Motet does not either


@dataclass(slots=True)
class Side:
    """The measurements of one server."""

    laps: dict[int, Laps] = field(default_factory=lambda: defaultdict(Laps))  # by concurrency
    first_s: list[float] = field(default_factory=list)  # to the first token, with more adapters than slots
    whole_s: list[float] = field(default_factory=list)  # to the last one
    lost: list[str] = field(default_factory=list)  # why each request was that has no whole answer

    def tail_ms(self) -> list[float]:
        """With more adapters than slots: p50 and p99 of the TTFT, and p50 and p99 of the time to the whole answer."""
        return [quantile_ms(times_s, share) for times_s in (self.first_s, self.whole_s) for share in (0.5, 0.99)]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--inside", action="store_true", help="also vLLM's server with Motet's turns as its scheduler")
    parser.add_argument("--model", choices=sorted(SHAPES), default="XS", help="shape of the model (default: XS)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    try:
        vllm_peer.environment(KV_GIB)
    except vllm_peer.PeerMissing as missing:
        raise SystemExit(f"engines: {missing}; `make vllm` installs vLLM and Motet together") from None
    model, adapters = model_and_adapters(args.model)
    names = [path.name for path in adapters]
    sides = {"vllm": Side(), "motet": Side()} | ({"inside": Side()} if args.inside else {})
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory, ExitStack() as stack:
        servers = [
            stack.enter_context(vllm_server(model, adapters, slots=SLOTS)),
            stack.enter_context(over_motet(model, adapters, Path(directory))),
        ]
        if args.inside:
            servers.append(stack.enter_context(vllm_server(model, adapters, *INSIDE, slots=SLOTS, name="inside")))
        laps = QUICK_LAPS if args.quick else INSIDE_LAPS if args.inside else LAPS
        for server in servers:  # so that nothing is loaded or compiled while time counts
            lap_over_http(server.port, prompts(SLOTS, PROMPT_TOKENS, seed=1), 2, names[:SLOTS])
        for streams, count in laps.items():
            for number in args.watch.rounds(count, f"laps of {streams}"):
                asked = prompts(streams, PROMPT_TOKENS, seed=1000 * streams + number)
                for server in servers if number % 2 else servers[::-1]:
                    _settle(servers)
                    found = lap_over_http(server.port, asked, OUTPUT_TOKENS, names[:SLOTS])
                    sides[server.name].laps[streams].append(found)
        rate = LOAD * sides["vllm"].laps[max(laps)].tokens_per_s / OUTPUT_TOKENS
        for number in args.watch.rounds(1 if args.quick else ROUNDS, "rounds of arrivals"):
            trace = arrivals(QUICK_ARRIVALS if args.quick else ARRIVALS, rate, names, seed=number)
            for server in servers if number % 2 else servers[::-1]:
                _settle(servers)
                for first_s, whole_s in replay(server.port, trace):
                    sides[server.name].first_s.append(first_s)
                    sides[server.name].whole_s.append(whole_s)
        for server in servers if not args.inside else []:
            sides[server.name].lost = asyncio.run(shot(server, names[:SLOTS]))
    return _told(args.model, sides, rate, max(laps))


def over_motet(model: Path, adapters: Sequence[Path], data: Path) -> AbstractContextManager[Server]:
    """`motet up --engine vllm`, every service its own process."""
    port = free_port()
    argv = [vllm_peer.python(), "-m", "motet", "up", "--engine", "vllm", "--model", str(model), "--served-model-name", BASE]
    argv += ["--port", str(port), "--adapters-dir", str(adapters[0].parent), "--data-dir", str(data), "--drain-s", "2"]
    environment = vllm_peer.environment(KV_GIB) | {
        "MOTET_DTYPE": "bfloat16",
        "MOTET_KV_MEMORY_GIB": str(KV_GIB),
        "MOTET_LORA_MEMORY_MIB": "4096",
        "MOTET_MAX_LORAS": str(SLOTS),
        "MOTET_MAX_LORA_RANK": str(max(RANKS)),
        "MOTET_MAX_RUNNING": "64",
        "MOTET_MAX_STEP_TOKENS": "512",
        "MOTET_SLO_STANDARD_TPOT_MS": PATIENT_MS,
        "MOTET_SLO_STANDARD_TTFT_MS": PATIENT_MS,
    }
    return started_server("motet", argv, environment, port, adapters[-1].name)


def arrivals(count: int, rate: float, names: Sequence[str], *, seed: int) -> list[tuple[float, str, list[int]]]:
    """(seconds from the start, adapter, prompt) of `count` requests, `rate` of them per second."""
    draw = random.Random(seed)
    weights = [1 / (number + 1) ** ZIPF for number in range(len(names))]
    asked = zip(prompts(count, PROMPT_TOKENS, seed=77_000 + seed), poisson(rate, draw), strict=False)
    return [(at_s, draw.choices(names, weights)[0], prompt) for prompt, at_s in asked]


def replay(port: int, trace: Sequence[tuple[float, str, list[int]]]) -> list[tuple[float, float]]:
    """Seconds from arrival to the first token and to the end of every answer. Raises RuntimeError if one is not whole."""
    requests = []
    for at_s, model, prompt in trace:
        wire = post(completion(model, prompt, OUTPUT_TOKENS, stream=True), {"connection": "close"})
        requests.append(Request(wire=wire, at_s=at_s, keep=True))
    play(port, requests)
    for one in requests:
        if not one.whole:
            raise RuntimeError(f"an answer with status {one.status} is not whole: {bytes(one.data[-600:])!r}")
    return [(one.first_s - one.at_s, one.ended_s - one.at_s) for one in requests]


async def shot(server: Server, names: Sequence[str]) -> list[str]:
    """Kill vLLM's core in the middle of some streams. Returns the reason for each stream that did not become whole."""
    tokens, under_way = [0] * STREAMS, asyncio.Event()

    async def one(client: Client, number: int) -> str:
        body = completion(names[number % len(names)], prompts(1, PROMPT_TOKENS, seed=number)[0], STREAM_TOKENS)
        try:
            async for event in client.events("/v1/completions", body | {"stream_options": {"include_usage": True}}):
                if event.get("usage"):
                    return "" if event["usage"]["completion_tokens"] == STREAM_TOKENS else "it ended early"
                tokens[number] += 1
                if min(tokens) >= STREAM_TOKENS // 16:
                    under_way.set()
        except ApiError as error:
            return f"after {tokens[number]} events: {error}"
        return f"after {tokens[number]} events the connection ended"

    async with Client(f"http://127.0.0.1:{server.port}", timeout_s=HEAL_S) as client:
        asked = [asyncio.create_task(one(client, number)) for number in range(STREAMS)]
        begun = asyncio.create_task(under_way.wait())
        await asyncio.wait([begun, *asked], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        for pid in server.process.tree():
            if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        return [why for why in await asyncio.gather(*asked) if why]


def _settle(servers: Sequence[Server]) -> None:
    for server in servers:
        server.settle()


def _told(shape: str, sides: dict[str, Side], rate: float, most: int) -> dict[str, Any]:
    vllm, motet = sides["vllm"], sides["motet"]
    of_laps = [(name, streams, side.laps[streams]) for streams in vllm.laps for name, side in sides.items()]
    rows: list[list[object]] = [
        [f"{name}, {streams} at once", laps.ttft_ms(0.5), laps.ttft_ms(0.99), laps.tokens_per_s]
        for name, streams, laps in of_laps
    ]
    columns = ["", "TTFT p50 ms", "p99", "tokens/s"]
    print(report.table(f"{shape}: {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, {SLOTS} adapters in {SLOTS} slots", columns, rows))
    tails = {name: side.tail_ms() for name, side in sides.items()}
    columns = ["", "TTFT p50 ms", "p99", "answer p50 ms", "p99"]
    rows = [[name, *tail] for name, tail in tails.items()]
    print(report.table(f"32 adapters over {SLOTS} slots, {rate:.1f} requests/s", columns, rows))
    figures: dict[str, Any] = {
        "model": shape,
        "ttft_p99_vllm_alone_vs_ours": round(tails["vllm"][1] / tails["motet"][1], 3),
        "answer_p99_vllm_alone_vs_ours": round(tails["vllm"][3] / tails["motet"][3], 3),
        "requests_per_s": round(rate, 2),
        "slots_ms": {name: [round(one, 1) for one in tail] for name, tail in tails.items()},
    } | {f"{name}_ttft_p50_ms_c{streams}": round(laps.ttft_ms(0.5), 2) for name, streams, laps in of_laps}
    if "inside" in sides:
        inside = tails["inside"]
        return figures | {
            "ttft_p99_inside_vs_ours": round(inside[1] / tails["motet"][1], 3),
            "answer_p99_inside_vs_ours": round(inside[3] / tails["motet"][3], 3),
        }
    print(
        report.table(
            "kill -9 of the core", ["", f"lost of {STREAMS}"], [[name, len(side.lost)] for name, side in sides.items()]
        )
    )
    for name, side in sides.items():
        print(*(f"{name} lost one {why}" for why in sorted(set(side.lost))), sep="\n")
    middle = sorted(vllm.laps)[len(vllm.laps) // 2]
    return figures | {
        "mesh_ttft_vs_direct": round(motet.laps[middle].ttft_ms(0.5) / vllm.laps[middle].ttft_ms(0.5), 4),
        "mesh_throughput_vs_direct": round(motet.laps[most].tokens_per_s / vllm.laps[most].tokens_per_s, 4),
        "lost_vllm_alone": len(vllm.lost),
        "lost_ours": len(motet.lost),
    }
