"""A mesh on vLLM for tests: its stack, its clients, and faults in the middle of streams."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from motet.cli import credentials
from motet.cli.client import Client
from motet.examples.demo import BASE
from motet.examples.demo.tasks import TASKS
from tests.e2e.asking import PROMPT
from tests.e2e.live import ROOT, LiveStack
from tests.support import eventually

NUMBER_OF_STREAMS = 6
START_S = 240.0


@contextmanager
def vllm_stack(
    data_dir: Path, model: Path, engine_args: str, adapters: Path | None = None, start_s: float = START_S
) -> Iterator[LiveStack]:
    """`motet up --engine vllm` with one worker, three slots, and the adapters of a directory or the demo's.

    At the end it stops cleanly, and no process of vLLM is left.
    """
    env = {"MOTET_KV_MEMORY_GIB": "0.06", "MOTET_MAX_LORAS": "3", "MOTET_MAX_LORA_RANK": "64", "MOTET_MAX_RUNNING": "8"}
    flags = ["--engine", "vllm", f"--engine-args={engine_args}", "--drain-s", "1"]
    flags += ["--adapters-dir", str(adapters)] if adapters is not None else []
    flags += ["--model", str(model)]  # the last one: `native_worker` takes it too
    live = LiveStack(data_dir, *flags, env=env)
    live.launch()
    try:
        live.wait_ready(start_s)
        yield live
        cores = core_of(live.pid("worker-1"))
        assert live.stop() == 0, live.output.read_text()[-4000:]
        assert not [pid for pid in cores if Path(f"/proc/{pid}").exists()]
    finally:
        live.stop()


@asynccontextmanager
async def native_worker(stack: LiveStack) -> AsyncIterator[Callable[[], Awaitable[subprocess.Popen[bytes]]]]:
    """A function that starts a native worker beside the stack's, once, and returns its process."""
    facts = stack.facts()
    password = credentials.password_file(Path(facts.credentials_dir), "worker")
    flags = ["--model", stack.argv[-1], "--served-model-name", BASE, "--instance-id", "native", "--drain-s", "1"]
    flags += ["--nats-url", facts.nats_url, "--nats-user", "worker", "--nats-password-file", str(password)]
    flags += ["--ops-port", "0", "--threads", "1", "--max-lora-rank", "64", "--kv-memory-gib", "0.06"]
    log = (stack.data_dir / "native.log").open("ab")
    started: list[subprocess.Popen[bytes]] = []

    async def start() -> subprocess.Popen[bytes]:
        if not started:
            argv = [sys.executable, "-m", "motet", "worker", *flags]
            started.append(await asyncio.to_thread(subprocess.Popen, argv, cwd=ROOT, stdout=log, stderr=log))
        return started[0]

    try:
        yield start
    finally:
        for process in started:
            process.terminate()
            await asyncio.to_thread(process.wait, 30)
        log.close()


async def said(client: Client, model: str = BASE, **fields: Any) -> str:
    """The answer to a greedy completion."""
    body = {"model": model, "prompt": PROMPT("hello"), "max_tokens": 60, "temperature": 0} | fields
    return str((await client.call("POST", "/v1/completions", json=body))["choices"][0]["text"])


async def workers(client: Client) -> list[dict[str, Any]]:
    status = await client.call("GET", "/v1/status")
    return [worker for worker in status["workers"] if not worker["stale"] and not worker["draining"]]


async def serving(client: Client, worker_id: str) -> bool:
    return worker_id in {worker["worker_id"] for worker in await workers(client)}


async def stream(client: Client, number: int, length: int, progress: list[int]) -> tuple[str, int]:
    """A long completion, greedy except for the last one: its text, and the number of billed tokens."""
    sampled = number == NUMBER_OF_STREAMS - 1
    body = {
        "model": TASKS[number % 4].adapter,
        "prompt": PROMPT(f"gdud flwi {number}"),
        "max_tokens": length,
        "ignore_eos": True,
        "temperature": 0.8 if sampled else 0.0,
        "seed": 1,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    tokens = 0
    async for event in client.events("/v1/completions", body):
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        pieces += [choice["text"] for choice in event["choices"]]
        progress[number] = len(pieces)
    return "".join(pieces), tokens


async def go_on_through(client: Client, fault: Callable[[], Awaitable[None]], *, tokens: int = 400) -> None:
    """Inject a fault in the middle of some streams.

    Each of them gets all its tokens, and greedy streams get the same as without.
    """
    await eventually(lambda: workers(client), within_s=START_S, every_s=0.5)
    quiet, progress = [0] * NUMBER_OF_STREAMS, [0] * NUMBER_OF_STREAMS
    calm = await asyncio.gather(*(stream(client, number, tokens, quiet) for number in range(NUMBER_OF_STREAMS)))

    async def strike() -> None:
        await eventually(lambda: min(progress) >= 10, within_s=90)
        await fault()
        assert max(progress) < tokens, "the fault came too late"

    *shaken, _ = await asyncio.gather(
        *(stream(client, number, tokens, progress) for number in range(NUMBER_OF_STREAMS)), strike()
    )
    for number, (one, other) in enumerate(zip(shaken[:-1], calm[:-1], strict=True)):
        assert one == other, f"stream {number} of {NUMBER_OF_STREAMS} went on in another way"
    assert [billed for _, billed in shaken] == [tokens] * NUMBER_OF_STREAMS


def core_of(worker: int) -> list[int]:
    """Process ids of vLLM's core below a worker."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            child = f"\nPPid:\t{worker}\n" in status.read_text()
            name = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if child and b"EngineCore" in name:
            found.append(int(status.parent.name))
    return found
