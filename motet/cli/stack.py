"""The local stack: its processes, their connections, and its data directory.

    nats -> worker-1.., gateway-1.., registry, scheduler-1.., predictor     all at once: each waits for what it needs

    data directory:  lock  stack.json  credentials/<user>.password  nats/  logs/<child>.log  adapters/<worker>/

Processes drain in the order gateway, worker, the others, NATS: first the entrance, last the bus.

The stack owns the gateways' listening sockets. So a gateway can be replaced, or crash, without refused connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from motet.cli import credentials
from motet.cli.gpus import VARIABLE
from motet.cli.nats_health import keep_writable
from motet.cli.options import words_for
from motet.cli.process import Child, NatsProcess, ServiceProcess, ServiceSpec
from motet.cli.supervisor import MARGIN_S, State, Supervisor, Watcher
from motet.services.registry.config import PublishersConfig
from motet.shared.config import BusConfig, ConfigError, is_loopback, load
from motet.shared.provision import disk_bytes
from motet.shared.sockets import bound_socket
from motet.shared.tenancy import DEFAULT_TENANT

STOP_RANK = {"gateway": 0, "worker": 1, "scheduler": 2, "predictor": 2, "registry": 2, "nats": 3}
WORKER_REST_S = 1.0
RESTART_ORDER = ("nats", "registry", "predictor", "scheduler", "worker", "gateway")
RESTART_DRAIN_S = 600.0  # streams of a gateway that was replaced run to their end; a stop cuts them off after `drain_s`
GIB = 1 << 30
LEAST_FREE_BYTES = 256 << 20  # of the disk of a data directory that is in use
READY_S = 120.0  # a successor that is not ready by then is given up


class StackOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `motet up`. `model` and `adapters_dir` are local directories."""

    model: str
    served_model_name: str
    data_dir: Path
    adapters_dir: str = ""
    adapter_roots: tuple[str, ...] = ()  # where adapters may be registered from by path, besides adapters_dir
    workers: int = 1
    workers_least: int = 0  # with `workers_most`: the bounds of `grow` and `shrink`
    workers_most: int = 0  # 0: the number does not change
    gateways: int = 1
    schedulers: int = 1
    threads: int = 0  # per worker; 0 shares the cores
    gpus: tuple[str, ...] = ()  # CUDA_VISIBLE_DEVICES of each worker; () leaves it as it is
    host: str = "127.0.0.1"
    port: int = 8000
    nats_port: int = 0  # of the embedded server; 0 for a free one
    bus: BusConfig | None = None  # an existing NATS instead of an embedded one
    credentials_dir: Path | None = None  # per-service passwords for it
    tenants: tuple[str, ...] = (credentials.DEFAULT_TENANT,)
    drain_s: float = 20.0
    api_keys: str = "auto"  # whether clients need keys: see the gateway's --api-keys
    api_keys_file: str = ""
    tls_cert_file: str = ""  # of the gateways
    tls_key_file: str = ""
    notes: tuple[str, ...] = ()  # on the model's files, for people
    draws: bool = False  # whether the model is an image base
    chats_missing: str = ""  # why chats cannot be served; "" if they can
    given: Mapping[str, Any] = {}  # other options of services, for each that has them; they read the rest from their variables

    @property
    def keyless(self) -> bool:
        """Whether clients need no API key, so that each is an administrator."""
        return not self.api_keys_file and (self.api_keys == "off" or (self.api_keys == "auto" and is_loopback(self.host)))


class StackFacts(msgspec.Struct, kw_only=True):
    """`stack.json`: addresses and paths of the stack, for tools and tests. Contains no secrets."""

    pid: int
    urls: list[str]
    nats_url: str
    model: str
    credentials_dir: str
    ready: bool
    services: dict[str, dict[str, Any]]


class Stack:
    """One running stack. `await start()`, then `await failed()` or stop it; `await stop()` always, also after a failure.
    `program`: the command line of its services, up to the service's kind."""

    def __init__(
        self,
        options: StackOptions,
        watcher: Watcher,
        *,
        echo: Callable[[str, bytes], None] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "motet"),
    ) -> None:
        self.options = options
        self._watcher, self._echo, self._program = watcher, echo, program
        self.data_dir = options.data_dir.resolve()
        self.credentials_dir = options.credentials_dir or self.data_dir / "credentials"
        self._lock: IO[str] | None = None
        self._nats: NatsProcess | None = None
        self.listeners: list[socket.socket] = []  # one per gateway
        self._generation = 0  # how often everything was restarted
        self._changing = asyncio.Lock()  # one change of the processes at a time
        self._supervisor: Supervisor | None = None
        self._healing: asyncio.Task[None] | None = None
        self._ready = False
        self.urls: list[str] = []

    @property
    def nats_url(self) -> str:
        """The URL of NATS, once the stack has started."""
        if self._nats is not None:
            return self._nats.url
        return self.options.bus.nats_url if self.options.bus is not None else ""

    def names(self) -> list[str]:
        """The children of the start, in the order in which they start."""
        o = self.options
        copies = {"worker": o.workers, "gateway": o.gateways, "scheduler": o.schedulers}  # the slowest to start first
        names = [f"{kind}-{i + 1}" for kind, count in copies.items() for i in range(count)]
        return [*(["nats"] if o.bus is None else []), *names, "registry", "predictor"]

    async def start(self) -> None:
        """Start everything and wait until it is ready. Raises ConfigError, NatsStartError or supervisor.StartFailed."""
        self._take_lock()
        ports = [self.options.port + i if self.options.port else 0 for i in range(self.options.gateways)]
        shown = "127.0.0.1" if self.options.host in ("0.0.0.0", "::") else self.options.host
        for port in ports:
            self.listeners.append(_bound(self.options.host, port))
        scheme = "https" if self.options.tls_cert_file else "http"
        self.urls = [f"{scheme}://{shown}:{listener.getsockname()[1]}" for listener in self.listeners]
        children: list[Child] = []
        if self.options.bus is None:
            self._check_disk()
            text = credentials.authorization(self.credentials_dir, self.options.tenants)
            credentials.adopt_streams(self.data_dir / "nats" / "jetstream")
            log = self.data_dir / "logs" / "nats.log"
            self._nats = NatsProcess(self.data_dir / "nats", config_text=text, log_path=log, port=self.options.nats_port or -1)
            self._nats.stop_rank = STOP_RANK["nats"]
            children.append(self._nats)
        children += [self._service(name) for name in self.names() if name != "nats"]
        self._supervisor = Supervisor(children, self)
        await self._supervisor.start()
        self._ready = True
        self._write_facts()
        if self._nats is not None:
            self._healing = asyncio.create_task(keep_writable(self._nats, self._nats.signal, self._tell_of_nats))

    def _tell_of_nats(self, note: str) -> None:
        self._watcher.changed("nats", "ready", note)

    @property
    def ready(self) -> bool:
        """Whether the start is complete."""
        return self._ready

    @property
    def children(self) -> list[Child]:
        """All supervised processes."""
        return self._supervisor.children if self._supervisor is not None else []

    async def restart(self, say: Callable[[str], None]) -> None:
        """Replace every process by a new one while the others serve. Raises supervisor.StartFailed; the rest stays as it is.

        A successor starts beside its predecessor and takes over when it is ready. The single NATS server is restarted; services
        bridge the gap. A replaced gateway finishes its streams in the background.
        """
        assert self._supervisor is not None and self._ready, "start() comes first"
        async with self._changing:
            await self._restart(self._supervisor, say)

    async def _restart(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        self._generation += 1
        names = [child.name for child in self.children]
        for name in sorted(names, key=lambda name: RESTART_ORDER.index(name.split("-")[0])):
            if name not in [child.name for child in self.children]:  # a worker that could not start
                continue
            say(f"{name}: restarting")
            if name == "nats":
                await supervisor.bounce(name, ready_s=READY_S)
            else:
                await self._replace(name)
            self._write_facts()
            say(f"{name}: ready")

    async def replace(self, *names: str) -> None:
        """Replace some services by new ones side by side while the others serve. Raises supervisor.StartFailed."""
        assert self._ready, "start() comes first"
        self._generation += 1
        await asyncio.gather(*map(self._replace, names))
        self._write_facts()

    async def _replace(self, name: str) -> None:
        assert self._supervisor is not None, "start() comes first"
        gateway = name.startswith("gateway")
        drain_s = RESTART_DRAIN_S if gateway else self.options.drain_s + MARGIN_S
        await self._supervisor.replace(self._service(name), ready_s=READY_S, drain_s=drain_s, wait=not gateway)

    @property
    def workers(self) -> list[str]:
        """The workers that run or start; one that leaves is none of them."""
        return [child.name for child in self.children if child.name.startswith("worker")]

    @property
    def leaving(self) -> list[str]:
        """The processes that drain."""
        return self._supervisor.leaving if self._supervisor is not None else []

    async def grow(self, count: int) -> None:
        """Start workers until there are `count`; returns at once. A worker that cannot start goes again."""
        assert self._supervisor is not None and self._ready, "start() comes first"
        async with self._changing:
            taken = {*self.workers, *self.leaving}
            spare = 0 if self.options.gpus else len(self.leaving)  # the GPU of one that leaves is not free yet
            names = [f"worker-{i + 1}" for i in range(max(self.options.workers_most, count) + spare)]
            free = [name for name in names if name not in taken]
            for name in free[: max(0, count - len(self.workers))]:
                self._supervisor.add(self._service(name))
            self._write_facts()

    async def shrink(self, worker: str) -> None:
        """Let a worker drain and stop in the background, or the last one where this is none of them."""
        assert self._supervisor is not None and self._ready, "start() comes first"
        async with self._changing:
            named = [name for name in (worker, worker.rpartition("-")[0]) if name in self.workers]  # one that was replaced
            for name in (named or self.workers)[-1:]:
                await self._supervisor.remove(name, drain_s=self.options.drain_s + MARGIN_S)
            self._write_facts()

    async def failed(self) -> None:
        """Wait until the supervision of a process fails."""
        if self._supervisor is not None:
            await self._supervisor.failed()

    def hurry(self) -> None:
        """Cut the drain short."""
        if self._supervisor is not None:
            self._supervisor.hurry()

    async def stop(self) -> None:
        """Drain and stop everything, and release the data directory. Never raises."""
        if self._healing is not None:
            self._healing.cancel()
        for listener in self.listeners:
            listener.close()
        if self._supervisor is not None:
            await self._supervisor.stop(drain_s=self.options.drain_s)
        if self._lock is not None:
            (self.data_dir / "stack.json").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def changed(self, name: str, state: State, note: str) -> None:
        """Called by the supervisor."""
        if state in ("ready", "restarting"):
            self._write_facts()
        self._watcher.changed(name, state, note)

    def _take_lock(self) -> None:
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.data_dir / "logs").mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.data_dir / "logs") as probe:
                probe.write(bytes(4096))
            lock = (self.data_dir / "lock").open("a+")
        except OSError as error:
            why = error.strerror
            if isinstance(error, FileExistsError):
                why = "it is a file, not a directory"
            elif error.errno in (errno.ENOSPC, errno.EDQUOT):
                why = f"the disk is full, and {self._disk_bytes() / GIB:.1f} GiB are needed"
            raise ConfigError(
                f"--data-dir: cannot write in {self.data_dir}: {why}. Choose a directory that is yours, on a disk with room"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise ConfigError(
                f"--data-dir: a stack already runs in {self.data_dir} (process {holder}); stop it or choose another directory"
            ) from None
        self._lock = lock
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()

    def _check_disk(self) -> None:
        """Raise ConfigError when the embedded NATS has no room for its streams on the disk of the data directory."""
        free, needed = shutil.disk_usage(self.data_dir).free, self._disk_bytes()
        if free < needed:
            raise ConfigError(
                f"--data-dir: the disk of {self.data_dir} has {free / GIB:.1f} GiB free, and {needed / GIB:.1f} GiB are needed"
                " for durable requests and adapters. Choose a directory on a larger disk, or lower --tenant-stream-mib"
            )

    def _disk_bytes(self) -> int:
        """Free bytes that the disk of the data directory needs before a start."""
        if (self.data_dir / "nats" / "jetstream").exists():
            return LEAST_FREE_BYTES  # its streams have their room
        asked = {"tenant_stream_mib": self.options.given.get("tenant_stream_mib")}
        tenant_bytes = load(PublishersConfig, asked).tenant_stream_mib << 20
        # the server gives streams three quarters of what is free
        tenants = len({DEFAULT_TENANT, *self.options.tenants})
        return disk_bytes(tenants, tenant_bytes, draws=self.options.draws) * 4 // 3

    def _service(self, name: str) -> ServiceProcess:
        return ServiceProcess(self.spec_for(name), self.data_dir / "logs", echo=self._echo)

    def spec_for(self, name: str) -> ServiceSpec:
        """How to run the child `name`; tests change it here."""
        o, kind = self.options, name.split("-")[0]
        env: dict[str, str] = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        values: dict[str, Any] = {"drain_s": f"{RESTART_DRAIN_S if kind == 'gateway' else o.drain_s:g}"}
        pass_fds: tuple[int, ...] = ()
        if o.bus is None:
            # Ids that stay over a crash; on a shared server they could meet another stack's. A successor has its own beside
            # its predecessor.
            values["instance_id"] = f"{name}-{self._generation}" if self._generation else name
        if kind in ("registry", "worker", "gateway"):
            values |= {"model": o.model, "served_model_name": o.served_model_name}
        if kind == "registry":
            roots = [root for root in (o.adapters_dir, *o.adapter_roots) if root]
            values |= {"adapters_dir": o.adapters_dir, "adapter_roots": ",".join(roots), "tenants": ",".join(o.tenants)}
        if kind == "gateway":
            listener = self.listeners[int(name.rsplit("-", 1)[1]) - 1]
            pass_fds = (listener.fileno(),)
            values |= {"host": o.host, "port": listener.getsockname()[1], "listen_fd": listener.fileno()}
            values |= {"api_keys": o.api_keys} | _given(api_keys_file=o.api_keys_file)
            values |= _given(tls_cert_file=o.tls_cert_file, tls_key_file=o.tls_key_file)
        if kind == "worker":
            # a worker by itself leaves cores to its CPU LoRA processes, if it has any
            most = max(o.workers, o.workers_most)
            threads = o.threads or (max(1, _cores() // most) if most > 1 else 0)
            env["OMP_NUM_THREADS"] = str(threads or _cores())
            if o.gpus:
                env[VARIABLE] = o.gpus[int(name.rsplit("-", 1)[1]) - 1]
            values |= {"adapter_cache_dir": self.data_dir / "adapters" / name} | _given(threads=threads)

        def argv(ops_port: int) -> list[str]:
            bus = msgspec.structs.replace(self.bus_config(kind), nats_url=self.url_for(name))
            # all its options, so that no variable of the environment slips in
            decided = values | msgspec.structs.asdict(bus) | {"ops_port": ops_port}
            return [*self._program, kind, *words_for(kind, {**o.given, **decided})]

        after = ("nats",) if o.bus is None else ()
        rest_s = WORKER_REST_S if kind == "worker" and max(o.workers, o.workers_most) > 1 else 0.0
        return ServiceSpec(
            name=name, argv=argv, env=env, after=after, stop_rank=STOP_RANK[kind], rest_s=rest_s, pass_fds=pass_fds
        )

    def url_for(self, name: str) -> str:
        """The NATS URL for the child `name`; tests insert a proxy here."""
        return self.nats_url

    def bus_config(self, kind: str) -> BusConfig:
        """The connection of services of this kind to NATS. Secrets are passed as files."""
        config = msgspec.structs.replace(self.options.bus or BusConfig(), nats_url=self.nats_url)
        if self.options.bus is not None and self.options.credentials_dir is None:
            return config
        password_file = credentials.password_file(self.credentials_dir, kind)
        return msgspec.structs.replace(config, nats_user=kind, nats_password_file=str(password_file))

    def _write_facts(self) -> None:
        restarts = self._supervisor.restarts if self._supervisor is not None else {}
        services = {
            child.name: {"pid": child.pid, "restarts": restarts.get(child.name, 0)}
            | ({"ops_url": child.ops_url} if isinstance(child, ServiceProcess) else {})
            for child in self.children
        }
        facts = StackFacts(
            pid=os.getpid(),
            urls=self.urls,
            nats_url=self.nats_url,
            model=self.options.served_model_name,
            credentials_dir=str(self.credentials_dir),
            ready=self._ready,
            services=services,
        )
        with contextlib.suppress(OSError):  # a full disk must not end the stack
            credentials.write_private(
                self.data_dir / "stack.json", msgspec.json.format(msgspec.json.encode(facts)).decode() + "\n"
            )


def _cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bound(host: str, port: int) -> socket.socket:
    """A bound socket for gateways. Raises ConfigError when the port is taken."""
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise ConfigError(f"--port: cannot listen on {host}:{port}: {error.strerror}; --port 0 takes a free one") from None


def read_facts(data_dir: Path) -> StackFacts | None:
    """The facts of the stack in `data_dir`; None without a stack."""
    try:
        return msgspec.json.decode((data_dir / "stack.json").read_bytes(), type=StackFacts)
    except (OSError, msgspec.MsgspecError):
        return None


def _given(**options: str | int) -> dict[str, str | int]:
    """The options that have a value; a service reads the others from its environment."""
    return {name: value for name, value in options.items() if value}
