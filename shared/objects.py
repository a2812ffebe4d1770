"""Reads objects from JetStream at the speed of the connection.

The client library's own `get` answers the server's flow control only at the next heartbeat, so objects larger than about 2
MiB stall repeatedly for 0.25 s. This reader answers flow control at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import BinaryIO

from nats import errors as nats_errors
from nats.aio.subscription import Subscription
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig, ObjectInfo
from nats.js.object_store import ObjectStore

from motet.shared.bus import PENDING_BYTES, PENDING_MSGS, Bus

HEARTBEAT_S = 1.0
DEAF_S = 5.0
ANSWER_S, TRIES = 1.0, 5  # JetStream's answers may be lost while a cluster elects a leader: asked again, not waited for
PAUSE_S = 0.1
WRITE_BYTES = 1 << 20  # at once: a write waits for a thread, beside an engine for a millisecond or two


async def read_object(bus: Bus, store: ObjectStore, name: str, sink: BinaryIO) -> None:
    """Write the object `name` of `store` to `sink`; whether the bytes are the right ones is for the caller to check.

    Raises nats' ObjectNotFoundError, and its other errors when chunks are missing, nothing is heard for `DEAF_S`, or JetStream
    does not answer `TRIES` times.
    """
    for left in reversed(range(TRIES)):
        try:
            async with asyncio.timeout(ANSWER_S):
                info = await store.get_info(name)
            chunks = await _Chunks.of(bus, info)
            break
        except (nats_errors.Error, js_errors.ServiceUnavailableError, TimeoutError):
            if not left:
                raise
            await asyncio.sleep(PAUSE_S)
    try:
        await chunks.write(info.size or 0, sink)
    except js_errors.Error as error:
        raise js_errors.Error(f"{name}: {error}") from error
    finally:
        await chunks.close()


class _Chunks:
    """A push consumer of one object's chunks, to an inbox of its own."""

    def __init__(self, bus: Bus, inlet: Subscription) -> None:
        self._bus, self._inlet = bus, inlet

    @classmethod
    async def of(cls, bus: Bus, info: ObjectInfo) -> _Chunks:
        """Raises what JetStream says, or TimeoutError after `ANSWER_S`."""
        inbox = bus.nc.new_inbox()
        inlet = await bus.nc.subscribe(inbox, pending_msgs_limit=PENDING_MSGS, pending_bytes_limit=PENDING_BYTES)
        chunks = cls(bus, inlet)
        try:
            async with asyncio.timeout(ANSWER_S):
                await bus.js.add_consumer(
                    f"OBJ_{info.bucket}",
                    ConsumerConfig(
                        deliver_subject=inbox,
                        ack_policy=AckPolicy.NONE,
                        filter_subject=f"$O.{info.bucket}.C.{info.nuid}",
                        flow_control=True,
                        idle_heartbeat=HEARTBEAT_S,
                        inactive_threshold=DEAF_S,
                        mem_storage=True,
                        num_replicas=1,
                    ),
                )
        except BaseException:
            await chunks.close()
            raise
        return chunks

    async def write(self, size_bytes: int, sink: BinaryIO) -> None:
        """All `size_bytes` to `sink`."""
        received, written, sequence = 0, 0, 0
        parts: list[bytes] = []  # received and not written
        while received < size_bytes:
            msg = await self._inlet.next_msg(timeout=DEAF_S)
            if await self._bus.answered_control(msg, sequence):
                continue
            sequence += 1
            if (at := msg.metadata.sequence.consumer) != sequence:
                raise js_errors.Error(f"{at - sequence} chunks lost")
            parts.append(msg.data)
            received += len(msg.data)
            if received - written >= WRITE_BYTES or received >= size_bytes:
                await asyncio.to_thread(sink.writelines, parts)
                parts, written = [], received

    async def close(self) -> None:
        """Without a listener the server removes the consumer."""
        with contextlib.suppress(nats_errors.Error):
            await self._inlet.unsubscribe()
