"""`make soak`: a mesh under load for half an hour while adapters are added and removed; no service may grow.

    python -m tests.chaos.soak                  30 minutes
    python -m tests.chaos.soak --minutes 5

Every few seconds it reads resident memory, file descriptors, threads, tasks and subscriptions of every service. It prints a
line every minute, and a wrong answer at once. The first fifth of the time is warm-up. Growth is the smallest value of the last
third over the smallest value of the third after the warm-up, because load goes up and down and a leak only up. Memory may grow
by 5%. Load also moves between the copies of a service, so counts that depend on requests are added up over the copies. At the
end it prints a table and one line of JSON. Exit status 1 when something grew or an answer was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import aiohttp
import orjson

from motet.cli.adapters import upload
from motet.cli.client import ApiError, Client
from motet.cli.process import ServiceProcess
from motet.shared.clock import now_s
from tests.chaos.load import DurableLoad, Streams, make_asks
from tests.chaos.mesh import BASE, DEMO, TENANTS, ChaosMesh, MeshOptions

EVERY_S = 5.0
RSS_GROWTH = 1.05
SLACK = {"fds": 12, "threads": 2, "tasks": 5, "subscriptions": 3}  # what a moment's load and its adapters explain
KINDS = ("rss_mib", *SLACK)
_TASKS = re.compile(r"^motet_asyncio_tasks (\S+)$", re.M)

Samples = dict[tuple[str, str], list[float]]  # (service, kind) -> values in order

SMALL = {  # caches that are full before the warm-up ends
    "MOTET_KV_BLOCKS": "2048",
    "MOTET_HOST_CACHE_MIB": "8",
    "MOTET_DISK_CACHE_MIB": "32",
    "MOTET_PREDICTOR_WINDOW": "1024",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--keep", default="", help="directory for the data and logs; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="motet-soak-") as temporary:
        return asyncio.run(soak(Path(args.keep or temporary), args.minutes * 60, args.streams))


async def soak(directory: Path, seconds: float, streams: int) -> int:
    """Run load and take samples for `seconds`, then judge. Returns the exit status."""
    options = MeshOptions(workers=2, gateways=2, schedulers=2)
    options.env = SMALL
    mesh = ChaosMesh(directory, options)
    await mesh.start()
    try:
        samples, wrong, churned = await _run(mesh, seconds, streams)
    finally:
        await mesh.stop()
    grown = report(samples)
    figures = {"minutes": seconds / 60, "adapters": churned, "wrong": len(wrong), "grown": grown}
    print(json.dumps(figures))
    return 1 if wrong or grown else 0


async def _run(mesh: ChaosMesh, seconds: float, count: int) -> tuple[Samples, list[str], int]:
    asks = make_asks(50, mesh.adapters, BASE, max_tokens=100, seed=1)
    quiet = Streams(mesh.stack.urls, asks, 0, seed=1)
    await quiet.once(count)
    right = {attempt.ask: attempt.answer() for attempt in quiet.attempts}
    wrong: list[str] = []
    streams = Streams(mesh.stack.urls, asks, count, seed=1)
    nats = await mesh.connect()
    durable = DurableLoad(nats, asks, TENANTS, 1, seed=1)
    await streams.start()
    await durable.start()
    samples: Samples = defaultdict(list)
    began_s, answers, said, shown = now_s(), 0, 0, 0
    until_s = began_s + seconds
    churning = asyncio.create_task(_churn(mesh, until_s, wrong))
    while now_s() < until_s:
        await asyncio.sleep(EVERY_S)  # time: between two samples
        await _look(mesh, samples)
        ended = [attempt for attempt in streams.attempts if attempt.outcome is not None]
        streams.attempts = [attempt for attempt in streams.attempts if attempt.outcome is None]
        for attempt in ended:
            if attempt.outcome != "done":
                wrong.append(f"{attempt.outcome}: {attempt.reason}")
            elif not right[attempt.ask].same(attempt.answer()):
                wrong.append(f"changed: {attempt.request_id}")
        answers += len(ended)
        for line in wrong[shown:]:
            print("  " + line[:300], flush=True)
        shown = len(wrong)
        minute = int((now_s() - began_s) / 60)
        if minute > said:
            said = minute
            rss = ", ".join(f"{name} {values[-1]:.0f}" for (name, kind), values in sorted(samples.items()) if kind == "rss_mib")
            print(f"{minute:3} min  {answers} answers, {len(wrong)} wrong; MiB: {rss}", flush=True)
    churned = await churning
    await streams.stop()
    await durable.stop()
    wrong += [f"no result: {one.tenant}.{one.request_id}" for one in durable.sent if one.result is None]
    await nats.close()
    return samples, wrong, churned


async def _churn(mesh: ChaosMesh, until_s: float, wrong: list[str]) -> int:
    """Add, use and remove new adapters. Returns how many."""
    draw, count = random.Random(1), 0
    folder = mesh.directory / "fresh"
    async with Client(mesh.stack.urls[0], timeout_s=60.0) as client:
        while now_s() < until_s:
            source = DEMO / "adapters" / draw.choice(sorted(os.listdir(DEMO / "adapters")))
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(source, folder)
            config = orjson.loads((folder / "adapter_config.json").read_bytes())
            config["lora_alpha"] *= 1 + draw.random()
            (folder / "adapter_config.json").write_bytes(orjson.dumps(config))
            name = f"fresh-{count % 8}"
            try:
                await upload(client, name, folder)
                body = {"model": name, "prompt": "hello there\n", "max_tokens": 8}
                await asyncio.gather(*(client.call("POST", "/v1/completions", json=body) for _ in range(3)))
                await client.call("DELETE", f"/v1/adapters/{name}", params={"force": "true"})
                count += 1
            except ApiError as error:
                wrong.append(f"adapter {name}: {error}")
                await asyncio.sleep(1.0)  # time: a pause after an error
                with contextlib.suppress(ApiError):  # half done: the name is free again for the next one
                    await client.call("DELETE", f"/v1/adapters/{name}", params={"force": "true"})
            await asyncio.sleep(0.5)  # time: the rate of the load
    return count


async def _look(mesh: ChaosMesh, samples: Samples) -> None:
    subscriptions = await _subscriptions(mesh)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        for child in mesh.stack.children:
            assert isinstance(child, ServiceProcess)
            process = Path("/proc") / str(child.pid)
            async with session.get(f"{child.ops_url}/metrics") as answer:
                found = _TASKS.search(await answer.text())
            seen = {
                "rss_mib": int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20),
                "fds": len(os.listdir(process / "fd")),
                "threads": len(os.listdir(process / "task")),
                "tasks": float(found[1]) if found else 0.0,
                "subscriptions": subscriptions.get(child.pid, 0),
            }
            for kind, value in seen.items():
                samples[child.name, kind].append(float(value))


async def _subscriptions(mesh: ChaosMesh) -> dict[int, int]:
    """Subscriptions at the broker by process. A connection's port at the relay's near end identifies the process."""
    url = f"http://127.0.0.1:{next(iter(mesh.monitors.values()))}/connz?limit=1000"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        connections = (await answer.json())["connections"]
    by_port = {connection["port"]: connection["subscriptions"] for connection in connections}
    subscriptions: dict[int, int] = {}
    for name, relays in mesh.stack.relays.items():
        ports = [port for relay in relays for port in await relay.far_ports()]
        subscriptions[mesh.child(name).pid] = sum(by_port.get(port, 0) for port in ports)
    return subscriptions


def report(samples: Samples) -> int:
    """Print the table.

    Returns how many values have grown: memory by process, the rest by role, since load moves between copies.
    """
    grown, rows = 0, by_role(samples)
    print(f"{'service':<14}" + "".join(f"{kind:>22}" for kind in KINDS))
    for name in sorted({name for name, _ in rows}):
        line = f"{name:<14}"
        for kind in KINDS:
            values = rows.get((name, kind), [])
            if not values:
                line += " " * 22
                continue
            rest = values[len(values) // 5 :]
            third = max(1, len(rest) // 3)
            before, after = min(rest[:third]), min(rest[-third:])
            allowed = before * RSS_GROWTH if kind == "rss_mib" else before + SLACK[kind]
            more = after > allowed
            grown += more
            line += f"{f'{before:.0f} to {after:.0f}' + (' !' if more else ''):>22}"
        print(line)
    return grown


def by_role(samples: Samples) -> Samples:
    """Memory of each process as it is; descriptors, threads, tasks and subscriptions summed over the copies of a service."""
    rows: Samples = {}
    for (name, kind), values in samples.items():
        key = (name if kind == "rss_mib" else re.sub(r"-?\d+$", "", name), kind)
        rows[key] = [a + b for a, b in zip(rows[key], values, strict=True)] if key in rows else values
    return rows


if __name__ == "__main__":
    sys.exit(main())
