"""The KV blocks of a moved request: its new worker asks its old worker."""

from __future__ import annotations

import msgspec

from motet.shared.wire.refusal import Refused


class OpenKv(msgspec.Struct, tag="open", kw_only=True):
    """Asks for the KV blocks that are held under a token. `kv_format` is `WorkerLimits.kv_format`; `keys` name the content of
    the request's full blocks in order (`policies.memory.kv_blocks`). The blocks are held for `within_s` longer."""

    token: str
    kv_format: str
    keys: list[bytes]
    within_s: float


class ReadKv(msgspec.Struct, tag="read", kw_only=True):
    """Asks for `size` bytes of the opened blocks from byte `offset` on. The range must lie within one piece (`KvOpened`)."""

    token: str
    offset: int
    size: int


class ProbeKv(msgspec.Struct, tag="probe", kw_only=True):
    """Asks for `size` zero bytes, to measure how long a transfer takes."""

    size: int


KvRequest = OpenKv | ReadKv | ProbeKv


class KvOpened(msgspec.Struct, tag="opened", kw_only=True):
    """The blocks of the first `blocks` keys can be read: `block_bytes` each, one after another, in pieces of `piece_blocks`."""

    blocks: int
    block_bytes: int
    piece_blocks: int


class KvPart(msgspec.Struct, tag="part", kw_only=True):
    """The bytes that were asked for."""

    data: bytes


KvReply = KvOpened | KvPart | Refused
