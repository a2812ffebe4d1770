"""Follows a KV bucket across broker crashes, lost consumers, dropped messages and hung servers.

A pass is one ephemeral push consumer: the last value of every key, then every change as it happens.

    subscribe inbox -> create consumer -> present state -> on_synced(keys) -> changes ... -> interrupted -> next pass

A pass ends when the connection is lost, when a message is missing (consumer sequence numbers have no gaps), or when nothing
arrived for `DEAF_S` although the server sends a heartbeat every `HEARTBEAT_S`. No change between two passes is lost: values
are repeated, and keys that a caller holds but `on_synced` does not list were deleted in between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from nats import errors as nats_errors
from nats.aio.subscription import Subscription
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.kv import KV_DEL, KV_MARKER_REASON, KV_OP, KV_PURGE

from motet.shared import nats_compat
from motet.shared.bus import PENDING_BYTES, PENDING_MSGS, Bus
from motet.shared.clock import now_s
from motet.shared.errors import Unavailable
from motet.shared.telemetry import logger

log = logger("motet.kv_watch")
HEARTBEAT_S = 0.5
DEAF_S = 1.75
LOOK_S = 0.25  # how often a silent pass looks at the connection
RETRY_S = 0.1
UNREAD_S = 5.0  # without the present state: then it is a trouble of the bucket, not of a moment


class KvWatch:
    """Follows the keys of `bucket` that match `pattern` (NATS wildcards) and reports them in the order of the stream.

    It calls `on_put(key, value)` for every value (repeated after an interruption), `on_delete(key)` for every delete marker,
    and `on_synced(keys)` with all existing keys whenever the whole present state was reported. Callbacks run in the event loop
    and must not block. A callback that raises is logged, and the watch goes on.
    """

    def __init__(
        self,
        bus: Bus,
        bucket: str,
        pattern: str,
        *,
        on_put: Callable[[str, bytes], None],
        on_delete: Callable[[str], None],
        on_synced: Callable[[set[str]], None],
    ) -> None:
        self._bus, self._bucket, self._prefix = bus, bucket, f"$KV.{bucket}."
        self._pattern = pattern
        self._on_put, self._on_delete, self._on_synced = on_put, on_delete, on_synced
        self._task: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        self._synced = False
        self._heard_s = 0.0
        self._came_s = 0.0  # the last value, or heartbeat once the present state is complete
        self.revision = 0
        """The revision of the last change that was reported in this pass."""

    async def start(self, *, wait_s: float = 15.0) -> None:
        """Start following; returns once the present state is reported. Raises Unavailable when nothing arrived for `wait_s`."""
        await self._bus.key_value(self._bucket, wait_s=wait_s)
        self._heard_s = self._came_s = now_s()
        self._task = self._bus.spawn(self._follow())
        self._bus.watches.append(self)
        while not self._first.is_set():
            try:
                await asyncio.wait_for(self._first.wait(), timeout=wait_s)
            except TimeoutError:
                if now_s() - self._came_s > wait_s:
                    await self.stop()
                    raise Unavailable(self._unread()) from None

    async def stop(self) -> None:
        """Stop following."""
        if self in self._bus.watches:
            self._bus.watches.remove(self)
        while self._task is not None and not self._task.done():  # wait_for swallows a cancellation that meets its result
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.5)

    @property
    def live(self) -> bool:
        """Whether the reported state is current: in sync, connected, and with a message from the server within `DEAF_S`."""
        return self._synced and self._bus.connected and now_s() - self._heard_s < DEAF_S

    def trouble(self) -> str:
        """Why the bucket cannot be followed; "" if it is, or was until a moment ago."""
        return self._unread() if now_s() - self._came_s > UNREAD_S else ""

    def _unread(self) -> str:
        return f"bucket {self._bucket} cannot be read: its stream KV_{self._bucket} is missing or damaged, or does not answer"

    async def _follow(self) -> None:
        while True:
            try:
                if self._bus.connected:
                    await self._pass()
                else:
                    self._came_s = now_s()  # not the bucket's trouble
            except nats_compat.FAILURES as error:
                log.info("watch interrupted", extra={"bucket": self._bucket, "error": repr(error)})
            finally:
                self._synced = False
            await asyncio.sleep(RETRY_S)

    async def _pass(self) -> None:
        inbox = self._bus.nc.new_inbox()
        inlet = await self._bus.nc.subscribe(inbox, pending_msgs_limit=PENDING_MSGS, pending_bytes_limit=PENDING_BYTES)
        try:
            info = await self._bus.js.add_consumer(
                f"KV_{self._bucket}",
                ConsumerConfig(
                    deliver_subject=inbox,
                    deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                    ack_policy=AckPolicy.NONE,
                    filter_subject=self._prefix + self._pattern,
                    flow_control=True,
                    idle_heartbeat=HEARTBEAT_S,
                    inactive_threshold=5.0,
                    mem_storage=True,
                    num_replicas=1,
                ),
            )
            empty = info.num_pending == 0 and (info.delivered is None or info.delivered.consumer_seq == 0)
            await self._read(inlet, empty)
        finally:
            with contextlib.suppress(*nats_compat.FAILURES):
                await inlet.unsubscribe()  # without a listener the server removes the consumer

    async def _read(self, inlet: Subscription, empty: bool) -> None:
        """Report until the pass ends. `empty`: no key matches, so that there is nothing to wait for."""
        reconnects = self._bus.reconnects
        began_s = now_s()
        keys: set[str] | None = set()  # of the present state, until it is complete
        sequence = self.revision = 0
        if empty:
            self._report_synced(set())
            keys = None
        while True:
            try:
                msg = await inlet.next_msg(timeout=LOOK_S)
            except nats_errors.TimeoutError:
                if now_s() - max(began_s, self._heard_s) > DEAF_S:
                    raise
                msg = None
            if not self._bus.connected or self._bus.reconnects != reconnects:
                return
            if msg is None:
                continue
            self._heard_s = now_s()
            if self._synced:
                self._came_s = self._heard_s
            if await nats_compat.answered_control(self._bus.nc, msg, sequence):
                continue
            at = msg.metadata
            if at.sequence.consumer != sequence + 1:
                raise js_errors.Error(f"{at.sequence.consumer - sequence - 1} updates lost")
            sequence += 1
            self._came_s = self._heard_s
            key, headers = msg.subject.removeprefix(self._prefix), msg.headers or {}
            deleted = headers.get(KV_OP) in (KV_DEL, KV_PURGE) or KV_MARKER_REASON in headers
            if keys is not None:
                keys.discard(key) if deleted else keys.add(key)
            self._report(key, None if deleted else msg.data)
            self.revision = at.sequence.stream
            if keys is not None and at.num_pending == 0:
                self._report_synced(keys)
                keys = None

    def _report(self, key: str, value: bytes | None) -> None:
        try:
            if value is None:
                self._on_delete(key)
            else:
                self._on_put(key, value)
        except Exception:
            log.exception("watcher failed", extra={"bucket": self._bucket, "key": key})

    def _report_synced(self, keys: set[str]) -> None:
        try:
            self._on_synced(keys)
        except Exception:
            log.exception("watcher failed", extra={"bucket": self._bucket})
        self._synced, self._came_s = True, now_s()
        self._first.set()
