"""The life cycle of a service process: start, answer health checks, drain on SIGTERM or Ctrl-C, stop.

    build -> start() -> ready -> [signal] -> drain(), at most drain_s -> stop() -> exit 0
                              -> [failure()] ----------------------------> stop() -> exit 1, to be restarted

A second signal skips the rest of the drain. `/health` is 503 with the reason once the process can never work again; the
process then exits. `/ready` says whether it can work now (503 with the reasons otherwise). `/metrics` is Prometheus text.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Coroutine
from typing import Any, Literal, Protocol

import msgspec
import uvloop
from aiohttp import web
from msgspec import UNSET, UnsetType
from prometheus_client import exposition

from motet.shared.bus import Bus
from motet.shared.config import ConfigError, ServiceConfig
from motet.shared.errors import MotetError
from motet.shared.telemetry import REGISTRY, TASKS, configure_logging, logger

log = logger("motet.service")
FAILURE_POLL_S = 0.25
FAILED_STOP_S = 10.0  # for the stop of a process that has failed: whatever hangs then is left to the exit


class Service(Protocol):
    """The interface that `run` drives."""

    name: str

    async def start(self) -> None:
        """Connect and start serving."""

    def not_ready(self) -> list[str]:
        """The reasons why this service cannot work now; empty if it can."""

    def failure(self) -> str:
        """Why this process can never work again and must be replaced; "" if it can."""

    async def drain(self) -> None:
        """Accept nothing new and wait for running work. Cancelled at the deadline."""

    async def stop(self) -> None:
        """Release everything. Called exactly once, also when start failed half-way."""


class BusService:
    """Base of a service that only answers requests on the bus: ready while connected; leaves its queue groups on drain.

    A subclass sets `_bus` in its `start`.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._nats_url = config.bus.nats_url
        self._bus: Bus | None = None

    def not_ready(self) -> list[str]:
        if self._bus is None or not self._bus.connected:
            return [f"no connection to NATS at {self._nats_url}"]
        return self._bus.troubles()

    def failure(self) -> str:
        return self._bus.lost if self._bus is not None else ""

    async def drain(self) -> None:
        """Leave the queue groups and answer the requests received so far."""
        if self._bus is not None:
            await self._bus.stop_serving()

    async def stop(self) -> None:
        if self._bus is not None:
            await self._bus.close()


def metrics_text() -> bytes:
    """The metrics of this process in Prometheus text format."""
    return exposition.generate_latest(REGISTRY)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the process lives, and the reasons if not."""

    status: Literal["ok", "failed"]
    service: str
    reasons: list[str] | UnsetType = UNSET


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the service can work now, and the reasons if not."""

    ready: bool
    reasons: list[str]


def health(service_name: str, failure: str) -> tuple[Health, int]:
    """The body and the status code of `/health`."""
    if failure:
        return Health(status="failed", service=service_name, reasons=[failure]), 503
    return Health(status="ok", service=service_name), 200


class OpsServer:
    """The small HTTP server behind /health, /ready and /metrics."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service, self._host, self._port = service, host, port
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listen; returns the port."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        body, status = health(self._service.name, self._service.failure())
        return web.json_response(msgspec.to_builtins(body), status=status)

    async def _ready(self, _: web.Request) -> web.Response:
        reasons = self._service.not_ready()
        body = Ready(ready=not reasons, reasons=reasons)
        return web.json_response(msgspec.to_builtins(body), status=503 if reasons else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=metrics_text(), headers={"Content-Type": exposition.CONTENT_TYPE_LATEST})


async def live(service: Service, config: ServiceConfig) -> int:
    """Run `service` in this event loop, as `run` does."""
    loop = asyncio.get_running_loop()
    TASKS.set_function(lambda: len(asyncio.all_tasks(loop)))
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    ops = OpsServer(service, config.process.ops_host, config.process.ops_port)
    try:
        port = await ops.start()
        if not await _unless(stopping, service.start()):
            return 0
        gc.freeze()  # the garbage collector never looks again at what lives as long as the process
        log.info("started", extra={"ops": f"http://{config.process.ops_host}:{port}"})
        while not stopping.is_set():
            if why := service.failure():
                log.error("failed; ending to be started again", extra={"error": why})
                return 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), FAILURE_POLL_S)
        log.info("draining")
        await _unless(hurry, service.drain(), config.process.drain_s)
        return 0
    except MotetError as error:
        log.error("cannot start", extra={"error": error.message})
        return 1
    finally:
        try:
            await asyncio.wait_for(service.stop(), FAILED_STOP_S if service.failure() else None)
        except TimeoutError:
            log.error("could not stop in order")
        await ops.stop()
        log.info("stopped")


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None], timeout_s: float | None = None) -> bool:
    """Do `work` until it ends, `event` is set or the time is over; returns whether it ended. Raises what it raises."""
    working, told = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    await asyncio.wait({working, told}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    ended = working.done()
    for task in (told, working):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return ended


def run(service: Service, config: ServiceConfig) -> int:
    """Run `service` until it is told to stop; the exit status is 0 after a drain, 1 when it could not start or failed."""
    configure_logging(service.name, config.process.log_level, config.process.log_json)
    try:
        return uvloop.run(live(service, config))
    except ConfigError as error:
        print(f"motet {service.name}: {error}", file=sys.stderr)
        return 2
