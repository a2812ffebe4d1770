"""The stack under attack: `motet up` with the demo model, its answers before, and whether they are the same afterwards."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import aiohttp
from nats.aio.client import Client as NatsClient

from motet.cli import credentials
from motet.cli.client import ApiError, Client
from motet.shared.base_shapes import BaseShapes, read_shapes
from tests.e2e.live import BASE, DEMO, LiveStack
from tests.support import eventually

TENANTS = ("default", "acme")
ASKED = (BASE, "upper-case", "reverse", "rot13")
PROMPT = "many adapters one model"
LIMIT_BYTES = 8 << 20  # of an adapter, so that archives beyond it stay small
LIMITS = {"MOTET_MAX_ADAPTER_BYTES": str(LIMIT_BYTES), "MOTET_HUB_ALLOWED": "false"}


class FuzzMesh:
    """`start()`, attack it, ask whether it is `whole()`, `stop()`."""

    def __init__(self, directory: Path) -> None:
        self.live = LiveStack(directory, "--tenants", ",".join(TENANTS), env=LIMITS)
        self._right: dict[str, str] = {}
        self._pids: dict[str, int] = {}

    async def start(self) -> None:
        """Start the mesh and ask each model once."""
        self.live.launch()
        self.facts = self.live.wait_ready()
        self.url = self.facts.urls[0]
        await self.watch()
        self._right = await eventually(self.answers, within_s=30, every_s=0.2)

    def stop(self) -> None:
        self.live.stop()

    @property
    def shapes(self) -> BaseShapes:
        return read_shapes(DEMO / "model")

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def pids(self) -> dict[str, int]:
        return {name: int(service["pid"]) for name, service in self.live.facts().services.items()}

    async def watch(self) -> None:
        """From now on a service that is replaced counts as dead."""
        self._pids = self.pids()

    async def answers(self) -> dict[str, str]:
        """The greedy answers of the base model and some adapters; {} while one of them does not answer."""
        said = {}
        try:
            async with Client(self.url, timeout_s=30.0) as client:
                for model in ASKED:
                    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 24}
                    answer = await client.call("POST", "/v1/chat/completions", json=body | {"model": model})
                    said[model] = str(answer["choices"][0]["message"]["content"])
        except ApiError:
            return {}
        return said

    async def trouble(self, within_s: float = 60.0) -> str:
        """What is wrong: a service died, or answers changed or do not come within `within_s`; "" for nothing."""
        problem = ""
        try:
            await eventually(self._serves, within_s=within_s, every_s=0.5)
        except AssertionError as error:
            problem = f"it does not serve any more: {error}"
        died = [name for name, pid in self.pids().items() if self._pids.get(name) != pid]
        if died:
            words = {name: self.live.log(name)[-1500:] for name in died}
            problem += f"; died: {words}"
        return problem

    async def _serves(self) -> bool:
        said = await self.answers()
        assert said == self._right, f"{said} instead of {self._right}"
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as answer:
            assert answer.status == 200, await answer.text()
        return True

    async def restarted(self) -> str:
        """Kill every service but the broker. Stored data must not hurt a service that starts again. Returns as `trouble`."""
        for name in self.pids():
            if name != "nats":
                self.live.kill(name)
        before, self._pids = self._pids, {}

        def all_new() -> bool:
            return all(pid != before[name] for name, pid in self.pids().items() if name != "nats")

        try:
            await eventually(all_new, within_s=60, every_s=0.2)
            await eventually(self._serves, within_s=60, every_s=0.5)
        except AssertionError as error:
            return f"it does not serve after a restart: {error}"
        await self.watch()
        return ""

    async def restore(self) -> None:
        """Register the demo's adapters again, in case a user with that right deleted or replaced them."""
        for adapter in sorted((DEMO / "adapters").iterdir()):
            asked = {"name": adapter.name, "path": str(adapter), "replace": True}
            await self.call("POST", "/v1/adapters", json=asked)

    async def connect(self, user: str) -> NatsClient:
        """A connection to the broker as one of its users."""
        client = NatsClient()
        inbox = f"_INBOX_{user}".encode()
        await client.connect(self.facts.nats_url, user=user, password=self.password(user), inbox_prefix=inbox, error_cb=_quiet)
        return client

    def password(self, user: str) -> str:
        return credentials.password_file(Path(self.facts.credentials_dir), user).read_text().strip()

    def resident_bytes(self, service: str) -> int:
        statm = Path(f"/proc/{self.pids()[service]}/statm").read_text()
        return int(statm.split()[1]) * resource.getpagesize()

    async def call(self, method: str, path: str, **more: Any) -> Any:
        async with Client(self.url, timeout_s=60.0) as client:
            return await client.call(method, path, **more)


async def _quiet(_: Exception) -> None:
    """Ignore errors: the test tries to violate permissions."""
