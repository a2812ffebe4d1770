"""Invalid messages on every subject of the bus, as every user. NATS refuses what a user may not send, and everything else does
no lasting harm.

    users     the services and one publisher per tenant; not the operator, who may remove everything
    subjects  all that any user may publish to, with existing and unknown ids in place of wildcards
    messages  random bytes, messages with odd values, the same with bytes changed, deep nesting, several MB, Motet's headers

Messages that properly end, empty or remove something are left out: `Drain`, and JetStream's PURGE and DELETE.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Iterable, Iterator

import msgspec
import orjson
from nats import errors as nats_errors
from nats.aio.client import Client as NatsClient

from motet.cli.credentials import OPERATOR, grants
from motet.shared import subjects
from motet.shared.wire.kv import OpenKv, ProbeKv, ReadKv
from motet.shared.wire.prediction import Outcome, PredictRequest
from motet.shared.wire.registry import (
    AliasAdapter,
    DeleteAdapter,
    ListAdapters,
    PinAdapter,
    QuarantineAdapter,
    RegisterAdapter,
    ReleaseAdapter,
)
from motet.shared.wire.request import Cancel, GenerateRequest
from motet.shared.wire.stream import TokenFrame
from motet.shared.wire.worker_state import Lease, WorkerDelta, WorkerNotice, WorkerSnapshot
from tests.fuzz.mesh import TENANTS, FuzzMesh
from tests.fuzz.values import MESSAGES, WORDS, payload
from tests.support import eventually

ENDING = re.compile(r"\.(PURGE|DELETE)\.")
IDS = ("worker-1", "gateway-1", "scheduler-1", "nobody", "register", "list", "status", "r1")
ROLLUP = {"Nats-Rollup": "all"}
HEADERS: tuple[dict[str, str] | None, ...] = (
    *(None, None, None, {"Nats-Msg-Id": "fuzz"}, {"Nats-Stream": "MOTET_REQUESTS"}, {"KV-Operation": "DEL"}),
    *(ROLLUP, {"Nats-Expected-Last-Sequence": "x"}, {"Status": "100"}, {"Status": "503"}, {"x": "y" * 4000}),
    *({"Nats-TTL": "1s"}, {"KV-Operation": "?"}, {"Nats-Batch-Id": "b", "Nats-Batch-Sequence": "0"}),
)
SPOKEN: dict[str, tuple[type[msgspec.Struct], ...]] = {
    subjects.SUBMIT: (GenerateRequest,),
    ".assign": (GenerateRequest,),
    ".control": (Cancel,),
    ".kv": (OpenKv, ReadKv, ProbeKv),
    ".state": (WorkerSnapshot, WorkerDelta),
    ".notice": (WorkerNotice,),
    ".stream.": (TokenFrame,),
    subjects.PREDICT: (PredictRequest,),
    subjects.OUTCOME: (Outcome,),
    ".registry.": (
        RegisterAdapter,
        AliasAdapter,
        PinAdapter,
        QuarantineAdapter,
        ReleaseAdapter,
        DeleteAdapter,
        ListAdapters,
    ),
    subjects.KV_LEASES: (Lease,),
}
"""What belongs on a subject that contains the word."""
LARGE = 7 << 20  # the broker takes 8 MiB
FLUSH_EVERY = 64


def every_subject(rng: random.Random) -> list[str]:
    """One subject for each pattern that some user may publish to."""
    patterns = {subject for grant in grants(TENANTS).values() for subject in grant.publish if subject != ">"}
    patterns |= {f"_INBOX_{user}.{rng.randrange(10)}" for user in users()} | {"$SRV.PING", "$SYS.REQ.SERVER.PING"}
    return [_filled(one, rng) for one in sorted(patterns) if not ENDING.search(one)]


def users() -> list[str]:
    return [user for user in grants(TENANTS) if user != OPERATOR]


def _filled(pattern: str, rng: random.Random) -> str:
    words = [rng.choice(IDS) if word in ("*", ">") else word for word in pattern.split(".")]
    return ".".join(words)


def _messages(count: int, rng: random.Random) -> Iterator[tuple[str, str, bytes, dict[str, str] | None]]:
    """`count` of (user, subject, payload, headers). Every user publishes on every subject, then again where it may."""
    words = (*WORDS, *IDS, *TENANTS)
    granted = [(user, pattern) for user, grant in grants(TENANTS).items() if user != OPERATOR for pattern in grant.publish]
    may = [(user, _filled(pattern, rng)) for user, pattern in granted if not ENDING.search(pattern)]
    every = [(user, subject) for user in users() for subject in every_subject(rng)]
    rng.shuffle(every)
    for i in range(count):
        user, subject = every[(i // 3) % len(every)] if i % 3 == 0 else rng.choice(may)
        kinds = next((kinds for word, kinds in SPOKEN.items() if word in subject), MESSAGES)
        size = LARGE if rng.random() < 0.002 else 0
        data = rng.randbytes(size) if size else payload(rng, words, kinds if rng.random() < 0.7 else MESSAGES)
        yield user, subject, data, rng.choice(HEADERS)


async def fuzz(mesh: FuzzMesh, count: int, seed: int) -> tuple[int, str]:
    """Send `count` messages. Returns how many were sent, and what is wrong with the mesh afterwards ("" for nothing)."""
    rng = random.Random(seed)
    clients = {user: await mesh.connect(user) for user in users()}
    sent = 0
    try:
        for user, subject, data, headers in _messages(count, rng):
            client = clients[user]
            if user == "registry" and headers == ROLLUP:
                continue  # it would replace all that the registry knows, as only the registry may
            reply = f"_INBOX_{user}.fuzz" if rng.random() < 0.5 else ""
            try:
                await client.publish(subject, data, reply=reply, headers=headers)
            except (nats_errors.Error, ValueError):
                continue  # the client itself will not send it
            sent += 1
            if not sent % FLUSH_EVERY or len(data) == LARGE:
                await client.flush(timeout=30)
        await asyncio.gather(*(_beyond_the_limit(mesh, user) for user in users()))
    finally:
        await _close(clients.values())
    return sent, await mesh.trouble() or await _durable_trouble(mesh)


async def _beyond_the_limit(mesh: FuzzMesh, user: str) -> None:
    """Send more than the broker takes, which ends only the connection that sent it. No client library does this."""
    host, port = mesh.facts.nats_url.removeprefix("nats://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    login = {"user": user, "pass": mesh.password(user), "verbose": False, "pedantic": False}
    writer.write(b"CONNECT " + orjson.dumps(login) + b"\r\nPUB %s %d\r\n" % (subjects.SUBMIT.encode(), 9 << 20))
    said = await asyncio.wait_for(reader.read(), timeout=30)
    writer.close()
    assert b"Maximum Payload" in said, said[-200:]


async def _durable_trouble(mesh: FuzzMesh) -> str:
    """Whether each tenant still gets the result of a request over the bus."""
    for tenant in TENANTS:
        user = "upstream" if tenant == "default" else f"upstream-{tenant}"
        client = await mesh.connect(user)
        try:
            await _ask(client, tenant)
        except AssertionError as error:
            return f"no result for tenant {tenant}: {error}"
        finally:
            await _close([client])
    return ""


async def _close(clients: Iterable[NatsClient]) -> None:
    for client in clients:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.close(), timeout=5)


async def _ask(client: NatsClient, tenant: str) -> None:
    results: list[dict[str, object]] = []

    async def keep(msg: object) -> None:
        results.append(orjson.loads(msg.data))  # type: ignore[attr-defined]

    request_id = f"after-{random.randrange(1 << 40)}"
    await client.subscribe(subjects.results(tenant, request_id), cb=keep)
    await client.flush()
    request = {"request_id": request_id, "model": "upper-case", "prompt": "many", "max_tokens": 4}
    await client.publish(subjects.requests(tenant), orjson.dumps(request))
    await eventually(lambda: results, within_s=60, every_s=0.1)
    assert "error" not in results[0], results[0]
