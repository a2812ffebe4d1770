"""The gateway process: builds the parts and runs them through the common life cycle of a service.

Prompts, Detokenizer (files) -> Bus -> AdapterWatch, Fleet -> Owner -> Planner -> HTTP app, durable Intake
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from motet.services.gateway import metrics
from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.edge.app import build_app
from motet.services.gateway.edge.connections import GuardedProtocol, files_for, watch
from motet.services.gateway.edge.idempotency import Once
from motet.services.gateway.edge.tls import TlsListener
from motet.services.gateway.intake.intake import Intake
from motet.services.gateway.openai.image_base import ImageBase, ImageParts
from motet.services.gateway.openai.lanes import Lanes
from motet.services.gateway.openai.prepare import Preparer
from motet.services.gateway.openai.profiles import Profiles
from motet.services.gateway.openai.prompt import Prompts
from motet.services.gateway.owner.detokenize import Detokenizer
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.fleet_metrics import FleetCollector
from motet.services.gateway.owner.owner import Owner
from motet.services.gateway.owner.picture_files import PictureFiles
from motet.services.gateway.tenants.auth import Keys
from motet.services.gateway.tenants.limits import Limits
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.bus import Bus
from motet.shared.clock import now_s, unix_ms
from motet.shared.config import load_certificate
from motet.shared.errors import Unavailable
from motet.shared.hub import resolve_model
from motet.shared.image_shapes import is_image_base
from motet.shared.malloc import return_large_buffers
from motet.shared.placement import PlacementWatch
from motet.shared.service import run
from motet.shared.sockets import bound_socket
from motet.shared.telemetry import REGISTRY, logger

log = logger("motet.gateway")
KEEP_ALIVE_S = 75  # longer than what clients and balancers keep idle connections for
LINGER_S = 0.25  # for requests on connections that were just made to a gateway that leaves a shared socket
ARRIVING_S = 2.0  # for the rest of their heads, or a first one, on a busy machine
POLL_S = 0.05
SWITCH_S = 0.0005  # so soon a thread with a long request gives the interpreter back; Python's default is ten times that
SHUTDOWN_S = 2  # for answers that are on their way out after the drain


class GatewayService:
    """The gateway's HTTP server and durable intake. `port` is the bound port once started."""

    name = "gateway"

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.keys = Keys(config)
        self.gateway_id = config.process.identity("gateway")
        self.once = Once()
        self.limits = Limits(config, lambda: self.owner.inflight)
        self.port = 0
        self.started_s = unix_ms() // 1000
        self._started = self._leaving = self._draining = False
        self._waits_for = "the tokenizer"
        self._changed = asyncio.Event()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()  # what `stop` has to undo, last first

    async def start(self) -> None:
        config, http = self.config, self.config.http
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_certificate(tls, http.tls_cert_file, http.tls_key_file, flag="--tls")
        listener = _listen(http.host, http.port) if http.listen_fd < 0 else socket.socket(fileno=http.listen_fd)
        self._stack.callback(listener.close)
        self.port = listener.getsockname()[1]
        self.prompts, detokenizer, self._image_base = await asyncio.to_thread(_load, config)
        self.lanes = Lanes()
        self._stack.callback(self.lanes.close)
        self._waits_for = "NATS"
        self.bus = await Bus.connect(config.bus, self.gateway_id, inbox="gateway")
        self._stack.push_async_callback(self.bus.close)
        self._stack.push_async_callback(self._stop_serving)  # after the owner has ended the streams
        self._waits_for = "the registry, which sets up NATS"
        await self.keys.start(self.bus)
        self._stack.push_async_callback(self.keys.stop)
        self.adapters = AdapterWatch(self.bus, self._on_adapters, chats=True)
        self.fleet = Fleet(self.bus, config.base.name)
        self.owner = Owner(
            self.bus,
            self.fleet,
            detokenizer,
            gateway_id=self.gateway_id,
            base_model=config.base.name,
            max_inflight=config.requests.max_inflight,
            stream_buffer_tokens=config.requests.stream_buffer_tokens,
            park_s=config.requests.park_s,
            parked_max=config.requests.max_parked,
        )
        profiles = Profiles(self.prompts, self.adapters, enabled=config.answers.adapter_chats)
        self._stack.push_async_callback(profiles.close)
        self.preparer = Preparer(
            config,
            self.prompts,
            self.adapters,
            self.fleet,
            lambda tenant: self.limits.of(tenant).weight,
            profiles,
            lambda: self.bus.max_payload,
            ImageParts(self._image_base, self.lanes.pictures, PictureFiles(self.bus)) if self._image_base is not None else None,
        )
        self.intake = Intake(self.bus, self.owner, self.preparer, self.lanes.durable, config, self.limits)
        self.placements = PlacementWatch(self.bus, ">", self._changed.set)
        await self.adapters.start()
        await self.placements.start()
        self._stack.push_async_callback(self.adapters.stop)
        await self.fleet.start()
        await self.owner.start()
        self._stack.push_async_callback(self.owner.stop)
        await self.intake.start()
        self._stack.push_async_callback(self.intake.stop)
        self._observe()
        await self._serve(listener, tls if http.tls_cert_file else None)
        self._started = True
        scheme = "https" if config.http.tls_cert_file else "http"
        log.info("serving", extra={"url": f"{scheme}://{config.http.host}:{self.port}", "model": config.base.name})

    def not_ready(self) -> list[str]:
        if not self._started:
            return [f"waiting for {self._waits_for}"]
        if self._leaving or self._draining:
            return ["draining"]
        reasons = []
        if not self.bus.connected:
            reasons.append("no connection to NATS")
        elif not self.fleet.usable():
            reasons.append(self.fleet.why_none_serves())
        if trouble := self.keys.trouble():
            reasons.append(trouble)
        return reasons + self.bus.troubles()

    def failure(self) -> str:
        return self.bus.lost if self._started else ""

    def admit(self) -> None:
        """Raises Unavailable while draining, Overloaded at the limit: before anything is read or tokenized."""
        if self._draining:
            raise Unavailable("this gateway is shutting down", retry_after_s=1.0)
        self.owner.check_room()

    async def drain(self) -> None:
        if self.config.http.listen_fd >= 0 and self._server is not None:  # other gateways on the socket take new connections
            self._leaving = True
            await self._server.leave()
            # what has begun to arrive is answered: its client sent it to a socket that promises service
            await asyncio.gather(self.intake.drain(), self._server.emptied())
        self._draining = True
        await self.intake.drain()
        await self.owner.drain()

    async def stop(self) -> None:
        self._draining = True
        await self._stack.aclose()

    async def settled(self, visible: Callable[[], bool], within_s: float) -> bool:
        """Wait until `visible()` holds for the adapters that this gateway sees.

        Returns False if that takes longer than `within_s`.
        """
        deadline = now_s() + within_s
        while not visible():
            left = deadline - now_s()
            if left <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return True

    def _on_adapters(self) -> None:
        self._changed.set()

    def _observe(self) -> None:
        metrics.INFLIGHT.set_function(lambda: self.owner.inflight)
        collector = FleetCollector(self.fleet, self.config.base.name, self.adapters.all)
        REGISTRY.register(collector)
        self._stack.callback(REGISTRY.unregister, collector)

    async def _serve(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        config = self.config
        for parser in ("uvicorn", "python_multipart"):
            logging.getLogger(parser).setLevel(logging.ERROR)  # invalid requests are the clients' business
        GuardedProtocol.max_connections = files_for(config.http.max_connections)
        server_config = uvicorn.Config(
            build_app(self),
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
        self._server = _Server(server_config, listener, tls)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener] if tls is None else []))
        watching = asyncio.get_running_loop().create_task(watch(self._server.server_state.connections))
        self._stack.callback(watching.cancel)
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise Unavailable("the HTTP server did not start")
            await asyncio.sleep(0.01)

    async def _stop_serving(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, because the service's life is driven by shared.service, and with its own TLS."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._listener, self._tls_context = listener, tls
        self._tls: TlsListener | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls_context is not None:
            connections = self.server_state.connections
            limit = GuardedProtocol.max_connections
            self._tls = TlsListener(self._listener, self._tls_context, self._protocol, connections, limit)
            self._tls.start()
        await super().startup(sockets)

    def _protocol(self) -> asyncio.Protocol:
        return GuardedProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is not None:
            await self._tls.end()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def leave(self) -> None:
        """Accept no new connections; close idle ones at once and others after their current answer.

        New connections get a moment to send their request.
        """
        for server in self.servers if self._tls is None else [self._tls]:
            server.close()
        await asyncio.sleep(LINGER_S)
        until_s, arriving = now_s() + ARRIVING_S, True
        while arriving:
            arriving = False
            for connection in list(self.server_state.connections):
                if isinstance(connection, GuardedProtocol) and connection.phase == "head" and now_s() < until_s:
                    arriving = True
                else:
                    connection.shutdown()
            await asyncio.sleep(POLL_S)

    async def emptied(self) -> None:
        """Wait until all connections are closed."""
        while self.server_state.connections:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(POLL_S)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _load(config: GatewayConfig) -> tuple[Prompts, Detokenizer, ImageBase | None]:
    model_dir = Path(resolve_model(config.base.model))
    if is_image_base(model_dir):
        base = ImageBase(model_dir)
        prompts = Prompts.unread(base.tokenizer.backend)
        return prompts, Detokenizer(prompts.tokenizer), base
    prompts = Prompts(model_dir, config.answers.chat_template)
    if prompts.templates.missing:
        log.warning("chats cannot be served", extra={"reason": prompts.templates.missing})
    return prompts, Detokenizer(prompts.tokenizer), None


def main(config: GatewayConfig) -> int:
    """Run a gateway until it is told to stop; returns the exit status."""
    sys.setswitchinterval(SWITCH_S)
    return_large_buffers()
    return run(GatewayService(config), config)
