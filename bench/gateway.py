"""SSE tokens per second of one gateway process, beside a bare Starlette generator that yields the same events ready-made.

    core A   the server: the gateway, or Starlette
    core B   the rest: nats-server, a synthetic engine (no model: token i of every stream is fixed) and the load client

All contestants get the same client: `STREAMS` keep-alive connections that ask again when an answer ends. The engine speaks
the workers' protocol over a real nats-server: one frame per step with one token for every stream.

    flat out    the engine is up to `AHEAD` steps ahead of what the client has seen, so the server is never short of tokens;
                Starlette's generators yield ready-made events and never wait. `gateway_vs_starlette` compares these two.
    lock-step   the next step starts when the client has seen the last one; Starlette's generators wait for the step as well.
                One event per write, as with a real engine; whoever waits for whom, the CPU per token tells the cost.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from bench import report
from bench.gateway_load import Counters, load
from bench.gateway_parts import STREAM_TOKENS, engine, gateway_server, starlette_server, write_model
from motet.nats_server import NatsServer

STREAMS = 256
AHEAD = 256
WARM_UP_S = 3.0
MEASURE_S = 10.0
SLICES = 5  # the rate is the median of so many parts: a disturbance in one does not count

MODES = (("flat out", AHEAD), ("lock-step", 1))

spawn = multiprocessing.get_context("spawn")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    seconds = args.seconds or (2.0 if args.quick else MEASURE_S)
    cores = sorted(os.sched_getaffinity(0))
    server_core, other_core = cores[0], cores[-1]
    os.sched_setaffinity(0, {other_core})  # children inherit it; servers move to theirs
    rows, figures = [], {}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        work = Path(directory)
        write_model(work / "bench")
        nats = NatsServer(work / "nats")
        url = asyncio.run(nats.start())
        try:
            counters = Counters(spawn)
            with _running(engine, url, counters), _running(gateway_server, url, str(work / "bench"), server_core) as server:
                for mode, window in MODES:
                    counters.window.value = window
                    rows.append(_measure(f"motet gateway, {mode}", server, counters, seconds))
        finally:
            nats.stop()
        for mode, window in MODES:
            counters = Counters(spawn)
            counters.window.value = window
            with _running(starlette_server, server_core, counters, window == 1) as server:
                rows.append(_measure(f"starlette generator, {mode}", server, counters, seconds))
    ours, ours_stepwise, rival, rival_stepwise = rows
    columns = ["server", "tokens/s", "us of CPU per token", "server CPU", "others' CPU", "reads/s"]
    print(report.table(f"SSE tokens/s of one process, {STREAMS} streams", columns, rows))
    figures = {
        "gateway_vs_starlette": round(ours[1] / rival[1], 3),
        "gateway_vs_starlette_per_cpu_s": round(rival[2] / ours[2], 3),
        "gateway_vs_starlette_lockstep_per_cpu_s": round(rival_stepwise[2] / ours_stepwise[2], 3),
        "gateway_tokens_per_s": round(ours[1]),
        "starlette_tokens_per_s": round(rival[1]),
        "streams": STREAMS,
        "stream_tokens": STREAM_TOKENS,
        "steps_ahead": AHEAD,
        "seconds": seconds,
    }
    return figures


Server = tuple[int, int]  # (process id, port)


@contextmanager
def _running(target: Callable[..., None], *args: Any) -> Any:
    """A child process; yields (pid, port) for a server, which sends its port when it is ready."""
    here, there = spawn.Pipe()
    process: SpawnProcess = spawn.Process(target=target, args=(there, *args))
    process.start()
    try:
        if not here.poll(30):
            raise RuntimeError(f"{target.__name__} did not start")
        assert process.pid is not None
        yield process.pid, here.recv()
    finally:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGTERM)
        process.join(15)
        if process.is_alive():
            process.kill()


def _measure(name: str, server: Server, counters: Counters, seconds: float) -> list[Any]:
    """One contestant: warm up, then count for `seconds`."""
    pid, port = server
    _wait_until_ready(port)
    client = spawn.Process(target=load, args=(port, STREAMS, STREAM_TOKENS, counters))
    client.start()
    try:
        time.sleep(WARM_UP_S)
        rates = []
        began, first, reads = time.monotonic(), counters.seen.value, counters.reads.value
        cpu, other = _cpu_s(pid), _others(pid)
        for _ in range(SLICES):
            slice_began, before = time.monotonic(), counters.seen.value
            time.sleep(seconds / SLICES)
            rates.append((counters.seen.value - before) / (time.monotonic() - slice_began))
        took, tokens = time.monotonic() - began, counters.seen.value - first
        reads, cpu, other = counters.reads.value - reads, _cpu_s(pid) - cpu, _others(pid) - other
    finally:
        client.terminate()
        client.join()
    if not tokens:
        raise RuntimeError(f"{name}: no token arrived")
    rate = statistics.median(rates)
    return [name, rate, cpu / tokens * 1e6, f"{cpu / took:.0%}", f"{other / took:.0%}", reads / took]


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                if b" 200 " in connection.recv(64):
                    return
        except ConnectionRefusedError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the server did not become ready")


def _cpu_s(pid: int) -> float:
    """CPU seconds a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _others(server_pid: int) -> float:
    """CPU seconds of this process's other descendants."""
    children = {int(p) for p in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}
    return sum(_cpu_s(pid) for pid in children - {server_pid} if Path(f"/proc/{pid}").exists())
