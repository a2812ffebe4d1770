"""SSE tokens per second of one gateway process, beside a bare Starlette generator that yields the same events ready-made.

    core A   the server: the gateway, or Starlette
    core B   the rest: nats-server, a synthetic engine (no model: token i of every stream is fixed) and the load client

All contestants get the same client: `STREAMS` keep-alive connections that ask again when an answer ends. The engine speaks
the workers' protocol over a real nats-server: one frame per step with one token for every stream.

    lock-step   the next step starts when the client has seen the last one; Starlette's generators wait for the step as well.
                There is one event per write, as with a real engine. The result is CPU time per token, and the headline.
    flat out    the engine is up to `AHEAD` steps ahead of the client, so the server is never short of tokens; Starlette's
                generators yield ready-made events and never wait. `gateway_vs_starlette` compares these two.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
import urllib.error
from pathlib import Path
from typing import Any

from bench import report
from bench.gateway_parts import STREAM_TOKENS, engine, gateway_server, starlette_server, write_model
from bench.rig.answers import get
from bench.rig.closed_loop import Counters, load
from bench.rig.nats import nats_server
from bench.rig.processes import Spawned, cpu_s, process_tree, spawn, spawned
from bench.rig.waiting import until

STREAMS = 256
AHEAD = 256
WARM_UP_S = 2.0
ROUNDS = 3  # all contestants in turn, so that a busy time of the machine affects all
SECONDS = 4
READY_S = 30.0
BODY = {"model": "bench", "prompt": [1, 2, 3], "stream": True, "ignore_eos": True, "max_tokens": STREAM_TOKENS}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    rounds, seconds = (1, 1) if args.quick else (ROUNDS, SECONDS)
    seconds = round(args.seconds) or seconds
    before = os.sched_getaffinity(0)
    server_core, other_core = min(before), max(before)
    os.sched_setaffinity(0, {other_core})  # children inherit it; servers move to theirs
    flat, step = Counters(spawn, AHEAD), Counters(spawn, 1)
    try:
        with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory, contextlib.ExitStack() as stack:
            work = Path(directory)
            write_model(work / "bench")
            url = stack.enter_context(nats_server(work))
            ours_counters = Counters(spawn, AHEAD)
            stack.enter_context(spawned(engine, url, ours_counters, within_s=READY_S))
            ours = stack.enter_context(spawned(gateway_server, url, str(work / "bench"), server_core, within_s=READY_S))
            rival = stack.enter_context(spawned(starlette_server, server_core, flat, False, within_s=READY_S))
            rival_paced = stack.enter_context(spawned(starlette_server, server_core, step, True, within_s=READY_S))
            contestants = [
                Contestant("motet gateway, lock-step", ours, ours_counters, 1),
                Contestant("starlette generator, lock-step", rival_paced, step, 1),
                Contestant("motet gateway, flat out", ours, ours_counters, AHEAD),
                Contestant("starlette generator, flat out", rival, flat, AHEAD),
            ]
            for _ in args.watch.rounds(rounds):
                for contestant in contestants:
                    contestant.measure(seconds)
    finally:
        os.sched_setaffinity(0, before)
    columns = ["server", "tokens/s", "us of CPU per token", "server CPU", "others' CPU", "tokens per read"]
    print(report.table(f"SSE tokens/s of one process, {STREAMS} streams", columns, [c.row() for c in contestants]))
    gateway_paced, starlette_paced, gateway, starlette = contestants
    lockstep = starlette_paced.cpu_us / gateway_paced.cpu_us
    print(f"lock-step, as behind a real engine: {lockstep:.2f} times Starlette's tokens per CPU second")
    return {
        "gateway_vs_starlette_lockstep_per_cpu_s": round(lockstep, 3),
        "gateway_lockstep_cpu_us_per_token": round(gateway_paced.cpu_us, 3),
        "starlette_lockstep_cpu_us_per_token": round(starlette_paced.cpu_us, 3),
        "gateway_vs_starlette": round(gateway.tokens_per_s / starlette.tokens_per_s, 3),
        "gateway_vs_starlette_per_cpu_s": round(starlette.cpu_us / gateway.cpu_us, 3),
        "gateway_tokens_per_s": round(gateway.tokens_per_s),
        "starlette_tokens_per_s": round(starlette.tokens_per_s),
        "gateway_cpu_us_per_token": round(gateway.cpu_us, 3),
        "starlette_cpu_us_per_token": round(starlette.cpu_us, 3),
        "streams": STREAMS,
        "stream_tokens": STREAM_TOKENS,
        "steps_ahead": AHEAD,
        "rounds": rounds,
        "seconds": seconds,
    }


class Contestant:
    """One server in one mode, and its measurements over all rounds."""

    def __init__(self, name: str, server: Spawned, counters: Counters, ahead: int) -> None:
        self.name, self._server, self._counters, self._ahead = name, server, counters, ahead
        self.tokens_per_s = 0.0  # in its best second: what else the machine does only slows it down
        self._tokens = self._reads = 0
        self._took_s = self._cpu_s = self._other_s = 0.0

    @property
    def cpu_us(self) -> float:
        """CPU time of the server per token, in microseconds."""
        return self._cpu_s / self._tokens * 1e6

    def row(self) -> list[Any]:
        """The contestant's line of the table."""
        shares = [f"{cpu / self._took_s:.0%}" for cpu in (self._cpu_s, self._other_s)]
        return [self.name, self.tokens_per_s, self.cpu_us, *shares, self._tokens / max(self._reads, 1)]

    def measure(self, seconds: int) -> None:
        """One round: load the server, let it warm up, then count second by second."""
        pid, port = self._server.pid, int(self._server.first)
        counters = self._counters
        until(lambda: _ready(port), lambda: "the server did not become ready", within_s=READY_S)
        counters.window.value = self._ahead
        client = spawn.Process(target=load, args=(port, STREAMS, BODY, counters))
        client.start()
        try:
            time.sleep(min(WARM_UP_S, seconds))
            began, tokens, reads = time.monotonic(), counters.seen.value, counters.reads.value
            cpu, other = cpu_s(pid), _others(pid)
            for _ in range(seconds):
                at, seen = time.monotonic(), counters.seen.value
                time.sleep(1.0)
                self.tokens_per_s = max(self.tokens_per_s, (counters.seen.value - seen) / (time.monotonic() - at))
            tokens = counters.seen.value - tokens
            self._tokens += tokens
            self._reads += counters.reads.value - reads
            self._took_s += time.monotonic() - began
            self._cpu_s += cpu_s(pid) - cpu
            self._other_s += _others(pid) - other
        finally:
            client.terminate()
            client.join()
        if not tokens:
            raise RuntimeError(f"{self.name}: no token arrived")


def _ready(port: int) -> bool:
    try:
        get(f"http://127.0.0.1:{port}/ready")
    except urllib.error.URLError:
        return False
    return True


def _others(server_pid: int) -> float:
    """CPU seconds of this process's other descendants."""
    others = process_tree(os.getpid())[1:]
    return sum(cpu_s(pid) for pid in others if pid != server_pid and Path(f"/proc/{pid}").exists())
