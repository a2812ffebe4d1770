"""Random values of message types, and bytes that are almost a message, for the fuzzer of the bus."""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from motet.shared.bus import encode
from motet.shared.wire.admin import ClusterStatus, StatusRequest
from motet.shared.wire.demand import DemandReport
from motet.shared.wire.kv import KvOpened, KvPart, OpenKv, ProbeKv, ReadKv
from motet.shared.wire.prediction import Outcome, Prediction, PredictRequest
from motet.shared.wire.refusal import Refused
from motet.shared.wire.registry import (
    AliasAdapter,
    DeleteAdapter,
    ListAdapters,
    PinAdapter,
    QuarantineAdapter,
    RegisterAdapter,
    RegistryOk,
    ReleaseAdapter,
)
from motet.shared.wire.request import Accepted, Assigned, Cancel, GenerateRequest, Move
from motet.shared.wire.stream import TokenFrame
from motet.shared.wire.worker_state import Lease, Ping, Pong, WorkerDelta, WorkerNotice, WorkerSnapshot

MESSAGES: tuple[Any, ...] = (
    *(GenerateRequest, Assigned, Accepted, Refused, TokenFrame, Cancel),
    *(Ping, Pong, WorkerSnapshot, Move),
    *(WorkerDelta, WorkerNotice, Lease, StatusRequest, ClusterStatus),
    *(
        PredictRequest,
        Prediction,
        Outcome,
        DemandReport,
        RegisterAdapter,
        AliasAdapter,
        PinAdapter,
        QuarantineAdapter,
        ReleaseAdapter,
        DeleteAdapter,
    ),
    *(ListAdapters, RegistryOk),
    *(OpenKv, ReadKv, ProbeKv, KvOpened, KvPart),
)
"""Every message but Drain, which a service may send and which ends a worker as it should."""

WORDS = ("", "default", "acme", "w", "x" * 300, "ü\x00\n", "../..", "a.b", "*", ">", "digest", "name/with/slashes", "{{7*7}}")
NUMBERS = (0, 1, -1, 2, 7, 64, 1000, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e300, -1e300, 5e-324, float("inf"), float("-inf"), float("nan"))


def random_value(kind: Any, rng: random.Random, words: tuple[str, ...] = WORDS) -> Any:
    """A value of the type `kind`, as msgspec reads annotations; strings are often of `words`."""
    scalars: dict[Any, Callable[[], Any]] = {
        str: lambda: rng.choice(words) if rng.random() < 0.9 else "".join(map(chr, rng.choices(range(1, 0xD7FF), k=9))),
        int: lambda: rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randrange(0, 300),
        float: lambda: rng.choice(FLOATS) if rng.random() < 0.7 else rng.uniform(-10, 1000),
        bool: lambda: rng.random() < 0.5,
        bytes: lambda: rng.randbytes(rng.choice((0, 3, 4, 16, 400))),
        types.NoneType: lambda: None,
        None: lambda: None,
    }
    if kind in scalars:
        return scalars[kind]()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _random_struct(kind, rng, words)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return random_value(inner[0], rng, words)
    if origin is Literal:
        return rng.choice(inner)
    if origin in (typing.Union, types.UnionType):
        return random_value(rng.choice(inner), rng, words)
    many = range(rng.choice((0, 1, 1, 2, 5)))
    if origin is dict:
        return {random_value(inner[0], rng, words): random_value(inner[1], rng, words) for _ in many}
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(random_value(one, rng, words) for one in inner)
    if origin in (list, tuple):
        return origin(random_value(inner[0], rng, words) for _ in many)
    raise TypeError(f"no random values of {kind}")


def _contains(hint: Any, kind: type) -> bool:
    """Whether values of `hint` hold values of `kind`, as an adapter's entry holds earlier ones: that would not end."""
    return hint is kind or any(_contains(inner, kind) for inner in get_args(hint))


def _random_struct(kind: type[msgspec.Struct], rng: random.Random, words: tuple[str, ...]) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    given = {}
    for one in msgspec.structs.fields(kind):
        if one.name == "v" or (not one.required and (rng.random() < 0.3 or _contains(hints[one.name], kind))):
            continue
        given[one.name] = random_value(hints[one.name], rng, words)
    return kind(**given)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """`data` with some bytes changed, cut out, repeated or added."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(5)
        if how == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif how == 1:
            del changed[at : at + rng.randrange(1, 9)]
        elif how == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == 3:
            changed[at:at] = changed[max(0, at - rng.randrange(1, 40)) : at]
        else:
            del changed[at:]
    return bytes(changed)


DEEP_JSON = b"[" * 100_000
DEEP_MSGPACK = b"\x91" * 100_000
HUGE_LENGTHS = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")


def payload(rng: random.Random, words: tuple[str, ...] = WORDS, kinds: tuple[Any, ...] = MESSAGES) -> bytes:
    """The bytes to send: random ones, nearly a message, or a message of `kinds` with odd values."""
    chosen = rng.random()
    if chosen < 0.2:
        return rng.randbytes(rng.choice((0, 1, 7, 100, 5000)))
    if chosen < 0.3:
        return rng.choice((DEEP_JSON, DEEP_MSGPACK, *HUGE_LENGTHS, b"null", b"{}", b'{"v":1}', b"\xc0", b"\x80", b"\x90"))
    if chosen < 0.4:
        return msgspec.json.encode(random_value(dict[str, int | str | list[str] | None], rng, words))
    message = encode(random_value(rng.choice(kinds), rng, words))
    return mutated(message, rng) if chosen < 0.7 else message
