"""What made an answer (adapter version, base model, engine): as headers, in durable results, and as a fingerprint.

    x-motet-adapter: upper-case@2:3f1c...      name, version of the name, digest of the content; without an adapter not sent
    x-motet-base:    motet-demo:9a02...        name and digest of the checkpoint (`shared.checkpoint_digest`)
    x-motet-engine:  native 0.1.0              engine of the worker and version of Motet

`system_fingerprint` is a hash of these and of the number formats that the worker computes with, as OpenAI's clients expect it:
when it has changed, an equal request with an equal seed may get another answer.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.metadata import version as installed_version
from typing import NamedTuple

import msgspec

from motet.shared.model import AdapterRef, WorkerLimits

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


def made_by(base_model: str, adapter: AdapterRef | None, limits: WorkerLimits | None) -> MadeBy:
    """Of an answer of the worker with these limits; None: it is not known any more."""
    engine = f"{limits.engine} {VERSION}" if limits is not None else ""
    base = f"{base_model}:{limits.base_digest}" if limits is not None and limits.base_digest else base_model
    numbers = () if limits is None else (limits.device, limits.quantization, limits.kv_cache_dtype, limits.kv_format)
    facts = repr((base, engine, numbers, adapter.digest if adapter is not None else ""))
    fingerprint = "fp_" + blake2b(facts.encode(), digest_size=FINGERPRINT_BYTES).hexdigest()
    name = f"{adapter.name}@{adapter.version}:{adapter.digest}" if adapter is not None else ""
    return MadeBy(base, engine, fingerprint, name)


class Answer(NamedTuple):
    """A whole answer: OpenAI's body, what made it, and the number of tokens that were generated for it."""

    body: msgspec.Struct
    made_by: MadeBy
    completion_tokens: int = 0
