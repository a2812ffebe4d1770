"""A whole mesh with fault injection: every process can be killed or frozen, every connection to NATS cut or silenced.

    service ──> relay per service and broker node ──> nats-1 [, nats-2, nats-3]

The NATS servers are children of the test process. The services are a `motet.cli.stack.Stack` on them, restarted by its
supervisor as under `motet up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from motet.cli import credentials
from motet.cli.client import ApiError, Client
from motet.cli.nats_server import NatsServer
from motet.cli.process import Child, ServiceSpec
from motet.cli.stack import Stack, StackOptions
from motet.cli.supervisor import State
from motet.examples.demo import BASE, DEMO
from motet.shared import subjects
from motet.shared.bus import decode, encode
from motet.shared.config import BusConfig
from motet.shared.wire.request import Move
from motet.shared.wire.worker_state import WorkerSnapshot, WorkerState
from tests.chaos.relay import Relay, RelayProcess
from tests.support import eventually

TENANTS = ("north", "south", "west")
VARIANTS = 8  # adapters beside the demo's own: the same weights with another scale
WORKER_SEATS = 256  # one worker carries the load of three, however slowly
ROUTE_PINGS = 'ping_interval: "500ms", ping_max: 2'  # as docs/operations.md says
MOVES_EVERY_S = 0.6  # after a heartbeat every worker has reported its requests
NATS_BACK_S = 1.0  # from the death of a broker to its restart
BUSIEST = "worker-busiest"  # stands for the worker with the most requests at the time of the fault
_REQUESTS = re.compile(r"^motet_worker_requests\{.*\} (\S+)$", re.M)


@dataclass(frozen=True)
class Served:
    """What a mesh serves: a model, its name in requests, its adapters, and the services' options for it."""

    model: Path
    base: str
    adapters: Path
    variants: int = 0  # more adapters: copies of so many with another scale
    draws: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)


TEXTS = Served(DEMO / "model", BASE, DEMO / "adapters", variants=VARIANTS)


class MeshOptions:
    """The number of each kind of process, and what they serve."""

    def __init__(
        self,
        *,
        nodes: int = 1,
        workers: int = 3,
        gateways: int = 2,
        schedulers: int = 2,
        source: Path | None = None,
        served: Served = TEXTS,
    ) -> None:
        self.nodes, self.workers, self.gateways, self.schedulers = nodes, workers, gateways, schedulers
        self.served = served
        self.env: dict[str, str] = {}  # of every service, besides its own
        self.source = source  # a checkout whose code the services run until they are restarted


class _RelayedStack(Stack):
    """A stack whose services reach every broker node through a relay of their own."""

    relays: dict[str, list[Relay]]
    source: Path | None = None
    env: Mapping[str, str] = {}

    def url_for(self, name: str) -> str:
        return ",".join(relay.url for relay in self.relays[name])

    def spec_for(self, name: str) -> ServiceSpec:
        spec = super().spec_for(name)
        env, argv = {**spec.env, **self.env}, spec.argv
        env["MOTET_ADMISSION"] = "room"  # what is tried is whether accepted requests survive, at any load
        if name.startswith("worker"):
            env["MOTET_MAX_RUNNING"] = str(WORKER_SEATS)
        if self.source is not None and not self._generation and not (name.startswith("gateway") and _no_fd(self.source)):
            env["PYTHONPATH"] = str(self.source)
            return msgspec.structs.replace(spec, env=env, argv=lambda port: _older(argv(port), self.source))
        return msgspec.structs.replace(spec, env=env)


class ChaosMesh:
    """`await start()`, inject faults, `await stop()`. Names are those of the stack, and `nats-1`, ... for the brokers."""

    def __init__(self, directory: Path, options: MeshOptions) -> None:
        self.directory, self.options = directory, options
        self.killed: dict[str, list[float]] = {}
        self._credentials = directory / "credentials"
        self.nats: dict[str, NatsServer] = {}
        self._relays = RelayProcess()
        self.monitors: dict[str, int] = {}  # ports of the brokers' own monitoring

    # ---- life

    async def start(self) -> None:
        await self._start_nats()
        served = self.options.served
        adapters = make_adapters(served, self.directory / "adapters")
        stack = _RelayedStack(
            StackOptions(
                model=str(served.model),
                served_model_name=served.base,
                draws=served.draws,
                given=served.given,
                adapters_dir=str(adapters),
                data_dir=self.directory / "data",
                workers=self.options.workers,
                gateways=self.options.gateways,
                schedulers=self.options.schedulers,
                threads=1,
                port=0,
                bus=BusConfig(nats_url=",".join(s.url for s in self.nats.values()), nats_replicas=self.options.nodes),
                credentials_dir=self._credentials,
                tenants=("default", *TENANTS),
                drain_s=5.0,
            ),
            self,
        )
        self.stack = stack
        stack.source, stack.env = self.options.source, self.options.env
        await self._relays.start()
        brokers = [server.port for server in self.nats.values()]
        names = [*stack.names(), self.spare]
        stack.relays = {name: [await self._relays.open("127.0.0.1", port) for port in brokers] for name in names}
        await stack.start()
        self.adapters = sorted(path.name for path in adapters.iterdir())
        await self.healed()

    async def _start_nats(self) -> None:
        names = [f"nats-{i + 1}" for i in range(self.options.nodes)]
        ports = free_ports(2 * len(names))
        routes = dict(zip(names, ports, strict=False))
        self.monitors = dict(zip(names, ports[len(names) :], strict=True))
        text = credentials.authorization(self._credentials, ("default", *TENANTS))
        every = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes.values())
        for name in names:
            extra = text + f'http: "127.0.0.1:{self.monitors[name]}"\n'
            if len(names) > 1:
                # not advertised: clients would learn ways around the relays
                extra += f'server_name: {name}\ncluster {{ name: chaos, listen: "127.0.0.1:{routes[name]}", '
                extra += f"routes: [{every}], no_advertise: true, {ROUTE_PINGS} }}\n"
            self.nats[name] = NatsServer(self.directory / name, config_text=extra)
        await asyncio.gather(*(server.start() for server in self.nats.values()))
        if len(names) > 1:
            bus = await self.connect()
            await eventually(lambda: _has_leader(bus), within_s=30, every_s=0.2)
            await bus.close()

    async def connect(self) -> NatsClient:
        """A connection to the brokers for the test harness, which may do everything."""
        client = NatsClient()
        await client.connect(
            [server.url for server in self.nats.values()],
            user=credentials.OPERATOR,
            password=credentials.password_file(self._credentials, credentials.OPERATOR).read_text().strip(),
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=_quiet,
        )
        return client

    async def move_requests(self, waves: int) -> int:
        """Move requests as a rebalancer does, but as many as possible. Returns how many moves were asked for.

        Every request that a worker has reported goes to another worker, `waves` times, also while the last assignments are
        still under way; three in four with their KV blocks.
        """
        client, asked, turn = await self.connect(), 0, 0
        shown: dict[str, tuple[str, int]] = {}  # request id -> (worker, epoch)
        heard: set[str] = set()  # workers

        async def hear(msg: Msg) -> None:
            said = decode(msg.data, WorkerState)
            heard.add(said.worker_id)
            for brief in said.requests if isinstance(said, WorkerSnapshot) else said.changed:
                shown[brief.request_id] = said.worker_id, brief.epoch

        await client.subscribe(subjects.WORKER_STATES, cb=hear)
        for _ in range(waves):
            await asyncio.sleep(MOVES_EVERY_S)  # time: between two waves
            workers = sorted(heard)
            for request_id, (worker_id, epoch) in shown.items():
                others = [one for one in workers if one != worker_id]
                if others:
                    turn += 1
                    move = Move(request_id=request_id, epoch=epoch, to=others[turn % len(others)], kv=turn % 4 > 0)
                    await client.publish(subjects.MOVE, encode(move))
                    asked += 1
        await client.drain()
        return asked

    async def stop(self) -> None:
        if hasattr(self, "stack"):  # it may not have come that far
            for relays in self.stack.relays.values():
                for relay in relays:
                    relay.heal()
            await self.stack.stop()
        await self._relays.stop()
        for server in self.nats.values():
            server.stop()

    def changed(self, name: str, state: State, note: str) -> None:
        """Called by the supervisor."""

    # ---- what can be done to it

    def child(self, name: str) -> Child:
        return next(child for child in self.stack.children if child.name == name)

    async def busiest(self) -> str:
        """The worker with the most requests."""

        async def requests(name: str) -> float:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with aiohttp.request("GET", f"{self.child(name).ops_url}/metrics") as answer:
                    return sum(map(float, _REQUESTS.findall(await answer.text())))
            return -1.0

        workers = [name for name in self.stack.names() if name.startswith("worker")]
        return max(zip(await asyncio.gather(*map(requests, workers)), workers, strict=True))[1]

    async def kill(self, name: str) -> None:
        """SIGKILL. A broker is started again after `NATS_BACK_S`, anything else by the supervisor."""
        name = await self.busiest() if name == BUSIEST else name
        self.killed.setdefault(name, []).append(asyncio.get_running_loop().time())
        if name not in self.nats:
            self.child(name).signal(signal.SIGKILL)
            return
        self.nats[name].kill()
        await asyncio.sleep(NATS_BACK_S)  # time: how long the broker is away
        await self.nats[name].start()

    async def freeze(self, name: str, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after `for_s`."""
        name = await self.busiest() if name == BUSIEST else name
        pid = self.nats[name].pid if name in self.nats else self.child(name).pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(for_s)  # time: how long the fault lasts
        os.kill(pid, signal.SIGCONT)

    async def cut(self, name: str, for_s: float) -> None:
        """Close a process's connections to all brokers and refuse new ones."""
        await self._cut(self.stack.relays[name], for_s)

    async def cut_node(self, node: str, for_s: float) -> None:
        """Cut all clients of one broker off from it."""
        at = list(self.nats).index(node)
        await self._cut([relays[at] for relays in self.stack.relays.values()], for_s)

    async def _cut(self, relays: list[Relay], for_s: float) -> None:
        for relay in relays:
            relay.cut()
        await asyncio.sleep(for_s)  # time: how long the fault lasts
        for relay in relays:
            relay.heal()

    async def silence(self, name: str, for_s: float) -> None:
        """Deliver nothing that a process sends or should receive, without closing a connection."""
        for relay in self.stack.relays[name]:
            relay.silence()
        await asyncio.sleep(for_s)  # time: how long the fault lasts
        for relay in self.stack.relays[name]:
            relay.heal()

    @property
    def spare(self) -> str:
        """The worker that is there while a mesh has one more."""
        return f"worker-{self.options.workers + 1}"

    async def resize(self, leaves: str) -> None:
        """A worker starts beside the others, `leaves` goes and comes again, the new one goes."""
        stack, more = self.stack, self.options.workers + 1
        for last in (leaves, self.spare):
            await stack.grow(more)
            await eventually(lambda: self._all_ready(more), within_s=60, every_s=0.2)
            await stack.shrink(last)
            await eventually(lambda: not stack.leaving, within_s=60, every_s=0.2)

    async def _all_ready(self, workers: int) -> bool:
        children = [child for child in self.stack.children if child.name.startswith("worker")]
        return len(children) == workers and not any(await asyncio.gather(*(child.not_ready() for child in children)))

    async def restart(self) -> None:
        """Replace every service by a fresh process, as `motet restart` does."""
        await self.stack.restart(lambda _: None)

    # ---- how it is

    async def healed(self, within_s: float = 90.0) -> None:
        """Wait until every process is ready and every gateway hears every worker."""

        async def whole() -> bool:
            children = self.stack.children
            if any(await asyncio.gather(*(child.not_ready() for child in children))):
                return False
            for url in self.stack.urls:
                try:
                    async with Client(url, timeout_s=5.0) as client:
                        status = await client.call("GET", "/v1/status")
                except ApiError:
                    return False
                live = [w for w in status["workers"] if not w["stale"] and not w["draining"]]
                if status["gateway"]["not_ready"] or len(live) != self.options.workers:
                    return False
            return True

        await eventually(whole, within_s=within_s, every_s=0.2)

    def log(self, name: str) -> Path:
        return self.stack.data_dir / "logs" / f"{name}.log"


def make_adapters(served: Served, directory: Path) -> Path:
    """The adapters of what is served, with their variants."""
    own = sorted(path for path in served.adapters.iterdir() if path.is_dir())
    for source in own:
        shutil.copytree(source, directory / source.name)
    for source in own[: served.variants]:
        target = directory / f"{source.name}-strong"
        shutil.copytree(source, target)
        config: dict[str, Any] = orjson.loads((target / "adapter_config.json").read_bytes())
        config["lora_alpha"] *= 1.25
        (target / "adapter_config.json").write_bytes(orjson.dumps(config))
    return directory


def names_of(options: MeshOptions) -> Iterable[str]:
    """Every service process of a mesh."""
    counts = {"worker": options.workers, "gateway": options.gateways, "scheduler": options.schedulers}
    return [*(f"{kind}-{i + 1}" for kind, count in counts.items() for i in range(count)), "registry", "predictor"]


def _older(argv: list[str], source: Path) -> list[str]:
    """The command line of a service without the options that the code in `source` does not have yet."""
    configs = (source / "shared" / "config.py", source / "services" / argv[3] / "config.py")
    known = "".join(path.read_text() for path in configs)
    options = zip(argv[4::2], argv[5::2], strict=True)
    kept = [word for option in options if f"{option[0][2:].replace('-', '_')}:" in known for word in option]
    return [sys.executable, "-P", *argv[1:4], *kept]


def _no_fd(source: Path) -> bool:
    """Whether the gateway of this checkout is too old to inherit its socket. Then the present gateway runs from the start."""
    return "listen_fd" not in (source / "services" / "gateway" / "config.py").read_text()


def free_ports(count: int) -> list[int]:
    """`count` different ports. All are held until the last is found."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def _has_leader(bus: NatsClient) -> bool:
    try:
        answer = orjson.loads((await bus.request("$JS.API.INFO", b"", timeout=1.0)).data)
    except Exception:
        return False
    return "error" not in answer


async def _quiet(_: Exception) -> None:
    """Brokers die here on purpose."""
