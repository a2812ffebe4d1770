"""Full and damaged disks: nothing acknowledged is lost, a durable request has one result, and /ready says what is wrong.

    python -m tests.chaos.disk        a minute; as root on Linux with small file systems, else with limits on the size of files

    full      NATS's disk fills while durable requests run; when it has room again, everything goes on by itself
    worker    a worker's disk cannot take an adapter: the others stay on it, and the answer comes at once
    damaged   the stored API keys are damaged while NATS is down

Prints one line per part and exits with status 1 when a promise was broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from nats.aio.client import Client as NatsClient
from safetensors.numpy import load_file, save_file

from motet.cli import credentials
from motet.cli.adapters import upload
from motet.cli.client import ApiError, Client
from motet.shared import subjects
from motet.shared.clock import now_s
from tests.e2e.live import BASE, DEMO, LiveStack
from tests.support import eventually

KEY = "mtt_admin-of-the-drill"
NATS_BYTES = 8 << 30  # of the small file system; it takes memory only for what is written
WORKER_BYTES = 4 << 20
RANK = 256  # the registry's limit: too much for that disk
REQUESTS = 24
FULL_S = 12.0


class Disk:
    """A file system that can be full: a small one of its own, or, where that cannot be mounted, none."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.directory, self._size_bytes = directory, size_bytes
        directory.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)]
        self.mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0

    def fill(self, pid: int) -> None:
        """No byte more for process `pid`."""
        if self.mounted:
            self._resize(shutil.disk_usage(self.directory).used + 4096)
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def make_room(self) -> None:
        """Room again. A limit on files ends with its process."""
        if self.mounted:
            self._resize(self._size_bytes)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.directory)], check=True)

    def _resize(self, size_bytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(self.directory)], check=True)


class Drill:
    """A stack whose NATS and worker have disks of their own."""

    def __init__(self, directory: Path) -> None:
        keys = directory / "keys"
        keys.write_text(f"{KEY} default admin\n")
        self.live = LiveStack(directory, "--api-keys", "required", "--api-keys-file", str(keys))
        self.nats_disk = Disk(self.live.data_dir / "nats", NATS_BYTES)
        self.worker_disk = Disk(self.live.data_dir / "adapters" / "worker-1", WORKER_BYTES)

    async def start(self) -> None:
        self.live.launch()
        self.url = self.live.wait_ready().urls[0]

    def stop(self) -> None:
        self.live.stop()
        self.nats_disk.close()
        self.worker_disk.close()

    async def reasons(self) -> list[str]:
        """Why the gateway is not ready; [] if it is."""
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as session,
            session.get(f"{self.url}/ready") as answer,
        ):
            body = await answer.json()
            assert (answer.status == 200) == body["ready"]
            return list(body["reasons"])

    async def says(self, word: str) -> bool:
        return any(word in reason for reason in await self.reasons())

    async def ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return not await self.reasons()
        return False

    async def call(self, method: str, path: str, **more: Any) -> Any:
        async with Client(self.url, timeout_s=60.0, api_key=KEY) as client:
            return await client.call(method, path, **more)

    async def ask(self, model: str) -> str:
        body = {"messages": [{"role": "user", "content": "many adapters"}], "temperature": 0, "max_tokens": 24, "model": model}
        answer = await self.call("POST", "/v1/chat/completions", json=body)
        return str(answer["choices"][0]["message"]["content"])

    def held(self) -> list[str]:
        """The adapters on the worker's disk."""
        return sorted(path.name for path in self.worker_disk.directory.glob("*.safetensors"))

    async def connect(self, user: str) -> NatsClient:
        password = credentials.password_file(Path(self.live.facts().credentials_dir), user).read_text().strip()
        client, inbox = NatsClient(), f"_INBOX_{user}".encode()
        options: dict[str, Any] = {"max_reconnect_attempts": -1, "reconnect_time_wait": 0.2, "error_cb": _quiet}
        await client.connect(self.live.facts().nats_url, user=user, password=password, inbox_prefix=inbox, **options)
        return client


async def full(drill: Drill) -> str:
    """Durable requests before, during and after the time in which NATS's disk is full."""
    publisher, operator = await drill.connect("upstream"), await drill.connect(credentials.OPERATOR)
    attempts = Counter[str]()

    async def seen(message: Any) -> None:
        attempts[message.subject] += 1

    await publisher.subscribe(subjects.results("default", "*"), cb=seen)
    before = drill.live.pid("nats")

    async def publish(number: int) -> None:
        """As publishers do: until it is acknowledged, with one message id."""
        body = {"request_id": f"job-{number}", "model": BASE, "prompt": f"count {number}", "max_tokens": 60, "ignore_eos": True}
        while True:
            with contextlib.suppress(Exception):
                await publisher.jetstream(timeout=2.0).publish(
                    subjects.requests("default"), orjson.dumps(body), headers={"Nats-Msg-Id": f"job-{number}"}
                )
                return
            await asyncio.sleep(0.2)  # time: a pause before it is sent again

    publishing = [asyncio.create_task(publish(number)) for number in range(REQUESTS // 2)]
    await asyncio.gather(*publishing)
    drill.nats_disk.fill(drill.live.pid("nats"))
    publishing = [asyncio.create_task(publish(number)) for number in range(REQUESTS // 2, REQUESTS)]
    waited = ""
    if drill.nats_disk.mounted:
        began_s = now_s()
        await eventually(lambda: drill.says("NATS has stored nothing in"), within_s=30, every_s=0.2)
        waited = f", said after {now_s() - began_s:.0f} s"
        assert "motet_bus_unwritable" in str(await drill.call("GET", "/metrics"))
        assert (await drill.ask(BASE)) is not None, "requests over HTTP are answered meanwhile"
        await asyncio.sleep(FULL_S)  # time: how long the disk is full
        assert drill.live.pid("nats") == before, "it is not restarted while there is no room"
        assert not await drill.ready()
    drill.nats_disk.make_room()
    room_s = now_s()
    await eventually(lambda: drill.live.pid("nats") != before, within_s=30)
    await eventually(drill.ready, within_s=30, every_s=0.1)
    whole_s = now_s() - room_s
    await asyncio.gather(*publishing)
    names = {subjects.results("default", f"job-{number}") for number in range(REQUESTS)}
    stream, js = subjects.results_stream("default"), operator.jetstream()

    async def results() -> dict[str, int]:
        with contextlib.suppress(Exception):
            return (await js.stream_info(stream, subjects_filter=">")).state.subjects or {}
        return {}

    async def all_there() -> bool:
        return names <= (await results()).keys()

    await eventually(all_there, within_s=120, every_s=0.5)
    assert await results() == dict.fromkeys(names, 1), await results()
    for name in names:
        assert orjson.loads((await js.get_last_msg(stream, name)).data or b"")["status"] == "ok"
    left = (await js.stream_info(subjects.requests_stream("default"))).state.messages
    assert left == 0, f"{left} requests are still there"
    await publisher.close()
    await operator.close()
    return (
        f"{REQUESTS} durable requests, one result each; ready {whole_s:.1f} s after there was room{waited};"
        f" a plain subscriber saw at most {max(attempts.values())} attempts of one result"
    )


async def worker(drill: Drill, directory: Path) -> str:
    """An adapter that the worker's disk cannot take."""
    if not drill.worker_disk.mounted:
        return "left out: no file system can be mounted"
    right = {name: await drill.ask(name) for name in ("upper-case", "reverse")}
    held = drill.held()
    huge = directory / "huge"
    shutil.copytree(DEMO / "adapters" / "sort-letters", huge)
    config = json.loads((huge / "adapter_config.json").read_text())
    weights = load_file(huge / "adapter_model.safetensors")
    for name, tensor in weights.items():  # the same product, with ranks of zeros
        wide = [(0, RANK - tensor.shape[0]), (0, 0)] if "lora_A" in name else [(0, 0), (0, RANK - tensor.shape[1])]
        weights[name] = np.pad(tensor, wide)
    save_file(weights, huge / "adapter_model.safetensors")
    config |= {"r": RANK, "lora_alpha": config["lora_alpha"] * RANK / config["r"], "rank_pattern": {}, "alpha_pattern": {}}
    (huge / "adapter_config.json").write_text(json.dumps(config))
    async with Client(drill.url, api_key=KEY) as client:
        await upload(client, "huge", huge)
    began_s = now_s()
    try:
        await drill.ask("huge")
        raise AssertionError("the adapter was served from a disk that cannot take it")
    except ApiError as error:
        took_s, why = now_s() - began_s, str(error)
    assert "disk is full" in why and took_s < 5, (why, took_s)
    assert drill.held() == held, "a served adapter was deleted"
    assert {name: await drill.ask(name) for name in right} == right
    return f"refused after {took_s:.2f} s: {why}"


async def damaged(drill: Drill) -> str:
    """Stored keys whose bytes have changed."""
    for _ in range(3):
        await drill.call("POST", "/v1/keys", json={"tenant": "default"})
    store = drill.nats_disk.directory / "jetstream"
    block = next(store.rglob(f"KV_{subjects.KV_KEYS}/msgs/*.blk"))
    before = drill.live.pid("nats")
    drill.live.kill("nats")
    data = bytearray(block.read_bytes())
    for i in range(40, 70):
        data[i] ^= 0xFF
    block.write_bytes(data)
    await eventually(lambda: drill.live.pid("nats") != before, within_s=30)
    await eventually(lambda: drill.says("motet_keys"), within_s=30, every_s=0.2)  # it cannot be read, or keys have vanished
    assert await drill.ask(BASE), "the keys of the file are taken"
    [reason] = [reason for reason in await drill.reasons() if "motet_keys" in reason]
    return reason


async def run(directory: Path) -> None:
    drill = Drill(directory)
    try:
        await drill.start()
        for name, part in (("full", full(drill)), ("worker", worker(drill, directory)), ("damaged", damaged(drill))):
            print(f"{name:<8} {await part}", flush=True)
    except BaseException:
        print(drill.live.output.read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        drill.stop()


async def _quiet(_: Exception) -> None:
    """NATS stops here on purpose."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="motet-disk-") as directory:
        try:
            asyncio.run(run(Path(directory)))
        except AssertionError as error:
            print(re.sub(r"\s+", " ", f"broken: {error}")[:2000])
            return 1
    return 0


if __name__ == "__main__":
    os.environ.pop("MOTET_API_KEY", None)
    sys.exit(main())
