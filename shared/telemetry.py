"""Logs and metrics. Logs are key=value lines or JSON; metrics are Prometheus, named `motet_*`, seconds and bytes as units."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from functools import partial
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, Histogram, PlatformCollector, ProcessCollector

REGISTRY = CollectorRegistry(auto_describe=True)
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip

counter, gauge = partial(Counter, registry=REGISTRY), partial(Gauge, registry=REGISTRY)
histogram = partial(Histogram, registry=REGISTRY)
latency = partial(histogram, buckets=LATENCY_BUCKETS_S)
"""Make metrics that `/metrics` shows; `latency` in seconds."""

BUS_REFUSED = counter("motet_bus_refused", "Messages refused or dropped, and connection errors, by reason.", ["reason"])
BUS_STORE_FAILURES = counter("motet_bus_store_failures", "Messages that NATS did not store, by stream or bucket.", ["stream"])
BUS_UNWRITABLE = gauge("motet_bus_unwritable", "1 for a stream or bucket that has stored nothing for 5 s.", ["stream"])
BUS_RECONNECTS = counter("motet_bus_reconnects", "Reconnections to NATS.")
BUS_REQUEST_S = latency("motet_bus_request_seconds", "Round-trip time of requests that this service sent, by verb.", ["verb"])

TASKS = gauge("motet_asyncio_tasks", "Tasks of this process's event loop.")
THREADS = gauge("motet_threads", "Python threads of this process.")
THREADS.set_function(threading.active_count)

_PLAIN = set(vars(logging.makeLogRecord({})))


class _Formatter(logging.Formatter):
    def __init__(self, service: str, as_json: bool) -> None:
        super().__init__()
        self.service, self.as_json = service, as_json

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = {k: v for k, v in vars(record).items() if k not in _PLAIN and k != "message"}
        if record.exc_info:
            facts["error"] = "".join(traceback.format_exception(*record.exc_info)).strip()
        if self.as_json:
            line = {"t": self.formatTime(record), "level": record.levelname.lower(), "service": self.service}
            return orjson.dumps(line | {"event": record.getMessage()} | facts, default=str).decode()
        tail = " ".join(f"{k}={v}" for k, v in facts.items())
        head = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {self.service:<10}"
        return f"{head} {record.getMessage()} {tail}".rstrip()


def configure_logging(service: str, level: str, as_json: bool) -> None:
    """Send every logger to stderr in one format. Call once per process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(service, as_json))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("nats").setLevel(logging.WARNING)


def logger(name: str) -> logging.Logger:
    """A logger; pass facts as `extra={"request_id": ...}`."""
    return logging.getLogger(name)
