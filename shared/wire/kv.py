"""KV blocks that travel: a worker asks another one for those of a request that moves, or of a prompt."""

from __future__ import annotations

import msgspec

from motet.shared.wire.refusal import Refused


class OpenKv(msgspec.Struct, tag="open", kw_only=True):
    """Asks for KV blocks, and for holding them for `within_s`: those that are held under a token, or, if `cached`, those in the
    prefix cache, which are held under this token from now on. `kv_format` is `WorkerLimits.kv_format`; `keys` name the content
    of the request's full blocks in order (`policies.memory.kv_blocks`)."""

    token: str
    kv_format: str
    keys: list[bytes]
    within_s: float
    cached: bool = False


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
