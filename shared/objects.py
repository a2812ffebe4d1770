"""An object store: large values under names, stored as chunks in a JetStream stream.

Reading is our own code: the client library's own `get` answers the server's flow control only at the next heartbeat, so objects
larger than about 2 MiB stall repeatedly for 0.25 s. This reader answers flow control at once.

Every method raises Unavailable when JetStream does not answer, and Overloaded when the store is full.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from io import BytesIO
from typing import Any, BinaryIO, Protocol

from nats import errors as nats_errors
from nats.aio.subscription import Subscription
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig, ObjectInfo, ObjectMeta, ObjectMetaOptions
from nats.js.object_store import ObjectStore

from motet.shared import nats_compat
from motet.shared.bus import PENDING_BYTES, PENDING_MSGS, Bus, reaching
from motet.shared.errors import MotetError, NotFound, TooLarge, Unavailable

HEARTBEAT_S = 1.0
DEAF_S = 5.0
ANSWER_S, TRIES = 1.0, 5  # JetStream's answers may be lost while a cluster elects a leader: asked again, not waited for
PAUSE_S = 0.1
WRITE_BYTES = 1 << 20  # at once: a write waits for a thread, beside an engine for a millisecond or two


class Readable(Protocol):
    """A source of an object's bytes."""

    def readinto(self, buffer: bytearray, /) -> int | None:
        """Fill `buffer`; returns the number of bytes, 0 at the end."""


class Objects:
    """One object store. Make one with `await Objects.open(...)`."""

    def __init__(self, bus: Bus, bucket: str, store: ObjectStore) -> None:
        self._bus, self._bucket, self._store = bus, bucket, store
        self._name, self._chunks = f"object store {bucket}", f"$O.{bucket}.C."

    @classmethod
    async def open(cls, bus: Bus, bucket: str, *, wait_s: float = 15.0) -> Objects:
        """The store, once the registry has provisioned it. Raises Unavailable after `wait_s`."""
        return cls(bus, bucket, await bus.object_store(bucket, wait_s=wait_s))

    async def put(self, name: str, data: bytes | Readable, *, chunk_bytes: int | None = None) -> None:
        """Store an object; an older object of this name is replaced."""
        meta = None if chunk_bytes is None else ObjectMeta(options=ObjectMetaOptions(max_chunk_size=chunk_bytes))
        with self._bus.stores.writing(self._name), reaching(self._name):
            await self._store.put(name, data, meta)  # type: ignore[arg-type]

    async def info(self, name: str) -> ObjectInfo | None:
        """Size and other facts of a stored object; None if there is none."""
        with reaching(self._name):
            try:
                info: ObjectInfo | None = await self._store.get_info(name)
            except js_errors.NotFoundError:
                info = None
        return info

    async def whole(self, name: str, size_bytes: int) -> bool:
        """Whether the object exists, has this size and has all its chunks."""
        info = await self.info(name)
        if info is None or info.size != size_bytes:
            return False
        chunks = self._chunks + str(info.nuid)
        return (await self._chunk_counts(chunks)).get(chunks, 0) == info.chunks

    async def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        with reaching(self._name), contextlib.suppress(js_errors.NotFoundError):
            await self._store.delete(name)

    async def orphans(self) -> set[str]:
        """The ids of interrupted uploads: chunks without an object. A running upload looks the same."""
        counts = await self._chunk_counts(self._chunks + "*")
        with reaching(self._name):
            try:
                live = {self._chunks + (info.nuid or "") for info in await self._store.list(ignore_deletes=True)}
            except js_errors.NotFoundError:
                live = set()
        return {subject.removeprefix(self._chunks) for subject in counts.keys() - live}

    async def drop_chunks(self, upload: str) -> None:
        """Free the chunks of an interrupted upload."""
        with reaching(self._name):
            await self._bus.js.purge_stream(f"OBJ_{self._bucket}", subject=self._chunks + upload)

    async def _chunk_counts(self, subject: str) -> dict[str, int]:
        with reaching(self._name):
            info = await self._bus.js.stream_info(f"OBJ_{self._bucket}", subjects_filter=subject)
        return info.state.subjects or {}


async def read_object(bus: Bus, store: Objects, name: str, sink: BinaryIO) -> None:
    """Write the object `name` of `store` to `sink`. The caller checks the content.

    Raises NotFound; Unavailable when chunks are missing, no message arrives for `DEAF_S`, or JetStream does not answer `TRIES`
    times; and whatever `sink` raises.
    """
    for left in reversed(range(TRIES)):
        try:
            async with asyncio.timeout(ANSWER_S):
                info = await store.info(name)
            if info is None:
                raise NotFound(f"there is no object {name}")
            chunks = await _Chunks.of(bus, info)
            break
        except (NotFound, Unavailable, TimeoutError) as error:  # a new object may not be on the asked node of a cluster yet
            if not left:
                raise error if isinstance(error, MotetError) else Unavailable(f"{name}: JetStream does not answer") from error
            await asyncio.sleep(PAUSE_S)
    try:
        await chunks.write(name, sink)
    finally:
        await chunks.close()


async def read_bytes(bus: Bus, store: Objects, name: str, most: int) -> bytes:
    """The bytes of an object, of which there may be `most`. Raises TooLarge for more, and what `read_object` raises."""
    sink = _Bounded(most)
    await read_object(bus, store, name, sink)
    return sink.getvalue()


class _Bounded(BytesIO):
    """Takes at most `most` bytes. Raises TooLarge for more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def writelines(self, parts: Iterable[Any], /) -> None:
        for part in parts:
            if self.tell() + len(part) > self._most:
                raise TooLarge(f"an object has more than {self._most} bytes")
            self.write(part)


class _Chunks:
    """A push consumer of one object's chunks, to an inbox of its own."""

    def __init__(self, bus: Bus, inlet: Subscription, size_bytes: int) -> None:
        self._bus, self._inlet, self._size_bytes = bus, inlet, size_bytes

    @classmethod
    async def of(cls, bus: Bus, info: ObjectInfo) -> _Chunks:
        """Raises Unavailable, or TimeoutError after `ANSWER_S`."""
        inbox = bus.nc.new_inbox()
        with reaching("NATS"):
            inlet = await bus.nc.subscribe(inbox, pending_msgs_limit=PENDING_MSGS, pending_bytes_limit=PENDING_BYTES)
        chunks = cls(bus, inlet, info.size or 0)
        try:
            async with asyncio.timeout(ANSWER_S):
                with reaching(f"object store {info.bucket}"):
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

    async def write(self, name: str, sink: BinaryIO) -> None:
        """The whole object to `sink`. Raises Unavailable, and what `sink` raises."""
        size_bytes = self._size_bytes
        received, written, sequence = 0, 0, 0
        parts: list[bytes] = []  # received and not written
        while received < size_bytes:
            with reaching(f"object {name}"):
                msg = await self._inlet.next_msg(timeout=DEAF_S)
                if await nats_compat.answered_control(self._bus.nc, msg, sequence):
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
