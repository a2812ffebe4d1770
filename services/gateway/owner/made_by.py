"""What made an answer (adapter version, base model, engine): as headers, in durable results, and as a fingerprint.

    x-motet-adapter: upper-case@2:3f1c...      name, version of the name, digest of the content; without an adapter not sent
                     of a picture with several or weighted ones: all of them, as style@1:3f1c...*0.8, comma-separated
    x-motet-base:    motet-demo:9a02...        name and digest of the checkpoint (`shared.checkpoint_digest`)
    x-motet-engine:  native 0.1.0              engine of the worker and version of Motet

`system_fingerprint` is a hash of these and of the number formats that the worker computes with, as OpenAI's clients expect it:
when it has changed, an equal request with an equal seed may get another answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from importlib.metadata import version as installed_version
from typing import NamedTuple

import msgspec

from motet.shared.model import Weighted, WorkerLimits

VERSION = installed_version("motet")
HEADERS = ("x-motet-adapter", "x-motet-base", "x-motet-engine")
FINGERPRINT_BYTES = 6


class MadeBy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts of one answer. `base` has no digest, and `engine` is empty, where its worker is not known any more."""

    base: str
    engine: str
    fingerprint: str
    adapter: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers."""
        return {name: value for name, value in zip(HEADERS, (self.adapter, self.base, self.engine), strict=True) if value}


def made_by(base_model: str, adapters: Sequence[Weighted], limits: WorkerLimits | None) -> MadeBy:
    """Of an answer of the worker with these limits; None: it is not known any more."""
    engine = f"{limits.engine} {VERSION}" if limits is not None else ""
    base = f"{base_model}:{limits.base_digest}" if limits is not None and limits.base_digest else base_model
    numbers = () if limits is None else (limits.device, limits.quantization, limits.kv_cache_dtype, limits.kv_format)
    facts = repr((base, engine, numbers, ",".join(map(_digest, adapters))))
    fingerprint = "fp_" + blake2b(facts.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()
    name = ",".join(f"{one.ref.name}@{one.ref.version}:{_digest(one)}" for one in adapters)
    return MadeBy(base, engine, fingerprint, name)


def _digest(adapter: Weighted) -> str:
    """The content of an adapter, with a weight that is not 1."""
    return adapter.ref.digest if adapter.weight == 1.0 else f"{adapter.ref.digest}*{adapter.weight:g}"


class Answer(NamedTuple):
    """A whole answer: OpenAI's body, what made it, and the number of tokens that were generated for it."""

    body: msgspec.Struct
    made_by: MadeBy
    completion_tokens: int = 0
