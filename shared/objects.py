"""Reads objects from JetStream at the speed of the connection.

The client library's own `get` answers the server's flow control only at the next heartbeat, so objects larger than about 2
MiB stall repeatedly for 0.25 s. This reader answers flow control at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import BinaryIO

from nats import errors as nats_errors
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.object_store import ObjectStore

from shared.bus import PENDING_BYTES, PENDING_MSGS, Bus

HEARTBEAT_S = 1.0
DEAF_S = 5.0
WRITE_BYTES = 1 << 20  # at once: a write waits for a thread, beside an engine for a millisecond or two


async def read_object(bus: Bus, store: ObjectStore, name: str, sink: BinaryIO) -> None:
    """Write the object `name` of `store` to `sink`. The caller checks the digest.

    Raises nats' ObjectNotFoundError, and its other errors when chunks are missing or nothing is heard for `DEAF_S`.
    """
    info = await store.get_info(name)
    size_bytes, received, written, sequence = info.size or 0, 0, 0, 0
    chunks: list[bytes] = []  # received and not written
    inbox = bus.nc.new_inbox()
    inlet = await bus.nc.subscribe(inbox, pending_msgs_limit=PENDING_MSGS, pending_bytes_limit=PENDING_BYTES)
    try:
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
        while received < size_bytes:
            msg = await inlet.next_msg(timeout=DEAF_S)
            if await bus.answered_control(msg, sequence):
                continue
            sequence += 1
            if (at := msg.metadata.sequence.consumer) != sequence:
                raise js_errors.Error(f"{at - sequence} chunks of {name} lost")
            chunks.append(msg.data)
            received += len(msg.data)
            if received - written >= WRITE_BYTES or received >= size_bytes:
                await asyncio.to_thread(sink.writelines, chunks)
                chunks, written = [], received
    finally:
        with contextlib.suppress(nats_errors.Error):
            await inlet.unsubscribe()  # without a listener the server removes the consumer
