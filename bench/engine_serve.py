"""`python -m bench engine --serve`: latencies over HTTP with 32 adapters, of Motet's mesh and of vLLM's OpenAI server.

Both servers are started as their users start them, with the adapters given at the start and the same KV space:

    start     from the process's start to the first token of the base model, and of the last adapter; the median of some starts
    latency   1, 8 and 32 requests at once, each with the next adapter: TTFT and the time between tokens (ITL).
              Both servers are up, one is asked at a time, with the same prompts, in turns
    memory    resident size of the process that holds the model, when all this is done
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from bench import report, vllm_peer
from bench.engine_parent import end, process_tree, rss_bytes
from bench.mesh_parts import Lap, prompts, stream
from bench.models import ADAPTERS, RANKS, model_and_adapters
from bench.watch import Watch
from motet.cli.lifeline import dying_with_parent
from motet.cli.process import free_port

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
LAPS = {1: 16, 8: 4, 32: 3}  # by concurrency
QUICK_LAPS = {1: 2, 8: 1, 32: 1}
STARTS = 3
KV_GIB = 1
START_S = 600.0
END_S = 60.0
QUIET_S = 0.5  # what a server must have been idle for before another one is measured
SETTLE_S = 30.0
IDLE_SHARE = 0.2  # of one core, by all of its processes
BASE = "bench"


class Server:
    """One server process. A context manager that starts it and waits for its first tokens."""

    def __init__(self, name: str, argv: list[str], environment: dict[str, str], port: int, adapter: str) -> None:
        self.name, self.port = name, port
        self._argv, self._environment, self._adapter = argv, environment, adapter
        self.first_token_s = self.first_adapter_token_s = 0.0

    def __enter__(self) -> Server:
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"motet-bench-{self.name}-", suffix=".log")
        began = time.monotonic()
        self._process = subprocess.Popen(
            self._argv,
            cwd=vllm_peer.ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=dying_with_parent(),
        )
        try:
            self.first_token_s = self._wait(BASE, began)
            self.first_adapter_token_s = self._wait(self._adapter, began)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait(self, model: str, began: float) -> float:
        """Ask until there is an answer. Returns the seconds since `began`."""
        answer = ""
        while time.monotonic() - began < START_S and self._process.poll() is None:
            status, answer = _complete(self.port, model)
            if status == 200:
                return time.monotonic() - began
            time.sleep(0.02)
        self._log.seek(0)
        raise RuntimeError(f"{self.name} does not serve {model!r} ({answer}); the end of its log:\n{self._log.read()[-6000:]}")

    def settle(self) -> None:
        """Wait until the server's threads have stopped spinning for work: they would run beside the server that is measured
        next.

        Raises RuntimeError if they never stop.
        """
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            began, before = time.monotonic(), self._cpu_s()
            time.sleep(QUIET_S)
            if self._cpu_s() - before < IDLE_SHARE * (time.monotonic() - began):
                return
        raise RuntimeError(f"{self.name} is still busy {SETTLE_S:.0f} s after its last answer")

    def processes(self) -> list[int]:
        """The server's process and all its descendants."""
        return process_tree(self._process.pid)

    def _cpu_s(self) -> float:
        return sum(report.cpu_s(pid) for pid in self.processes())

    def rss_mib(self) -> tuple[int, int]:
        """Resident memory: of the largest process, which has the model, and of all together."""
        sizes = [rss_bytes(pid) for pid in process_tree(self._process.pid)]
        return max(sizes) >> 20, sum(sizes) >> 20

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        family = process_tree(self._process.pid)
        self._process.send_signal(signal.SIGTERM)
        end(self._process, family, within_s=END_S)
        self._log.close()


def _complete(port: int, model: str) -> tuple[int, str]:
    """(status, answer) of a request for one token; (0, reason) when no server answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(300).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def motet_server(model: Path, adapters: list[Path], data: Path, quantization: str = "none") -> Server:
    """`motet up`, every service its own process."""
    port = free_port()
    size_mib = sum((path / "adapter_model.safetensors").stat().st_size for path in adapters) >> 20
    argv = [sys.executable, "-m", "motet", "up", "--model", str(model), "--served-model-name", BASE, "--port", str(port)]
    argv += ["--adapters-dir", str(adapters[0].parent), "--data-dir", str(data), "--drain-s", "2"]
    argv += ["--quantization", quantization]
    environment = os.environ | {"PYTHONPATH": str(vllm_peer.ROOT), "MOTET_KV_MEMORY_GIB": str(KV_GIB)}
    environment |= {"MOTET_LORA_MEMORY_MIB": str(size_mib + 16), "MOTET_MAX_LORA_RANK": str(max(RANKS))}
    return Server("motet", argv, environment, port, adapters[-1].name)


def vllm_server(model: Path, adapters: list[Path]) -> Server:
    """vLLM's OpenAI server with its best options (see vllm_peer)."""
    port, many = free_port(), str(len(adapters))
    argv = [vllm_peer.python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", BASE]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    # its own 4096 take as long for 32 prompts, show no first token before the last, and need 2.5 GiB more
    argv += [
        "--max-num-batched-tokens",
        "512",
        "--max-num-seqs",
        "64",
        "--enable-lora",
        "--max-loras",
        many,
        "--max-cpu-loras",
        many,
    ]
    argv += ["--max-lora-rank", str(max(RANKS)), "--disable-uvicorn-access-log"]
    argv += ["--lora-modules", *(f"{path.name}={path}" for path in adapters)]
    return Server("vllm", argv, vllm_peer.environment(KV_GIB), port, adapters[-1].name)


@dataclass(slots=True)
class Side:
    """The measurements of one server."""

    starts_s: list[float] = field(default_factory=list)
    adapter_starts_s: list[float] = field(default_factory=list)
    laps: dict[int, list[Lap]] = field(default_factory=dict)  # by concurrency
    rss_mib: tuple[int, int] = (0, 0)  # of the model's process, of all

    def ttft_ms(self, streams: int, share: float) -> float:
        return float(np.quantile([value for lap in self.laps[streams] for value in lap.first_s], share)) * 1000

    def itl_ms(self, streams: int, share: float) -> float:
        return float(np.quantile([value for lap in self.laps[streams] for value in lap.gaps_s], share)) * 1000


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
                    server = motet_server(model, adapters, data, args.quantization)
                else:
                    server = vllm_server(model, adapters)
                with ExitStack() as this_start:
                    this_start.enter_context(server)
                    side.starts_s.append(server.first_token_s)
                    side.adapter_starts_s.append(server.first_adapter_token_s)
                    if number == starts - 1:  # the last one stays
                        stack.push(this_start.pop_all())
            servers.append(server)
        _latencies(servers, sides, laps, tokens, names, args.watch)
        for server in servers:
            sides[server.name].rss_mib = server.rss_mib()
    _show(args.model, tokens, sides)
    setup = {"model": args.model, "serve": True, "quantization": args.quantization, "output_tokens": tokens}
    return setup | figures(sides)


def _latencies(
    servers: list[Server], sides: dict[str, Side], laps: dict[int, int], tokens: int, names: list[str], watch: Watch
) -> None:
    for server in servers:  # every adapter once, so that none is loaded while time counts
        stream(server.port, prompts(ADAPTERS, PROMPT_TOKENS, seed=1), 2, names)
    for streams, count in laps.items():
        for number in watch.rounds(count, f"laps of {streams}"):
            asked = prompts(streams, PROMPT_TOKENS, seed=1000 * streams + number)
            first = number * streams
            models = [names[(first + i) % len(names)] for i in range(streams)]
            for server in servers if number % 2 else servers[::-1]:
                for other in servers:
                    other.settle()
                sides[server.name].laps.setdefault(streams, []).append(stream(server.port, asked, tokens, models))


def figures(sides: dict[str, Side]) -> dict[str, Any]:
    """The bench's figures of these servers."""
    motet, vllm = sides["motet"], sides.get("vllm")
    most = max(motet.laps)
    found: dict[str, Any] = {f"itl_p50_ms_c{streams}": round(motet.itl_ms(streams, 0.5), 2) for streams in motet.laps}
    found["first_token_s"] = round(statistics.median(motet.starts_s), 2)
    if vllm is not None:
        found[f"ttft_c{most}_vs_vllm"] = round(motet.ttft_ms(most, 0.5) / vllm.ttft_ms(most, 0.5), 4)
        found["rss_vs_vllm"] = round(motet.rss_mib[0] / vllm.rss_mib[0], 3)
    for name, side in sides.items():
        found[name] = {
            "first_token_s": round(statistics.median(side.starts_s), 2),
            "first_adapter_token_s": round(statistics.median(side.adapter_starts_s), 2),
            "rss_mib": side.rss_mib[0],
            "rss_all_mib": side.rss_mib[1],
        }
        for streams in side.laps:
            found[name] |= {f"ttft_p{p}_ms_c{streams}": round(side.ttft_ms(streams, p / 100), 2) for p in (50, 99)}
            found[name] |= {f"itl_p{p}_ms_c{streams}": round(side.itl_ms(streams, p / 100), 2) for p in (50, 99)}
    return found


def _show(model: str, tokens: int, sides: dict[str, Side]) -> None:
    rows: list[list[object]] = []
    for streams in sides["motet"].laps:
        for name, side in sides.items():
            times = [measure(streams, share) for measure in (side.ttft_ms, side.itl_ms) for share in (0.5, 0.99)]
            rate = statistics.median(lap.tokens_per_s for lap in side.laps[streams])
            rows.append([f"{name}, {streams} at once", *times, rate])
    columns = ["", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "tokens/s"]
    print(report.table(f"{model}: {PROMPT_TOKENS} + {tokens} tokens over HTTP, {ADAPTERS} adapters", columns, rows))
    starts: list[list[object]] = [
        [name, statistics.median(side.starts_s), statistics.median(side.adapter_starts_s), *side.rss_mib]
        for name, side in sides.items()
    ]
    columns = ["", "first token s", "of an adapter s", "RSS MiB, model's process", "all processes"]
    print(report.table(f"Start and memory with {KV_GIB} GiB of KV space", columns, starts))
