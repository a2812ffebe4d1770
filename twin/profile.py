"""A worker's profile: what was measured of a live one, as a file that the twin simulates from.

    {"motet_profile": 1, "limits": {...}, "perf": {...}, "steps": {...}, "engine": {...}, "storage": {...}}

`limits` and `perf` are `shared.model`'s WorkerLimits and PerfModel; the rest is optional. Times must be finite and not
negative, and a decode step must take some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.model import PerfModel, WorkerLimits
from twin.events import to_ps
from twin.memory import LLAMA2_7B
from twin.steps import A10_MBGMV, Link, PerfSteps
from twin.storage import StorageModel
from twin.traces import FileError
from twin.worker import WorkerSpec

VERSION = 1
MIB = 1 << 20

_Ms = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]


class Steps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step costs besides the linear models of `perf`, in milliseconds."""

    schedule_ms: _Ms = 0.0
    waiting_ms: _Ms = 0.0  # per request that waits
    context_token_ms: _Ms = 0.0  # per token in the KV cache of the step's sequences


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker's configuration beyond its limits."""

    max_step_tokens: _Count = 512
    max_loras: _Count = 64
    prefix_cache: bool = False


class Storage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host memory for adapters, 0 for as much as is needed with everything in it, and the ways into it."""

    host_mib: Annotated[int, Meta(ge=0)] = 0
    disk_base_ms: _Ms = 1.0
    disk_ms_per_mib: _Ms = 0.5
    store_base_ms: _Ms = 5.0
    store_ms_per_mib: _Ms = 8.0


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    motet_profile: int
    name: str = ""
    limits: WorkerLimits
    perf: PerfModel
    steps: Steps = Steps()
    engine: EngineFacts = EngineFacts()
    storage: Storage = Storage()

    def spec(self) -> WorkerSpec:
        """The worker as the twin builds it."""
        extra, storage = self.steps, self.storage
        return WorkerSpec(
            limits=self.limits,
            perf=self.perf,
            steps=PerfSteps(
                self.perf,
                schedule_ms=extra.schedule_ms,
                waiting_ms=extra.waiting_ms,
                context_token_ps=to_ps(extra.context_token_ms),
            ),
            storage=StorageModel(
                host_bytes=storage.host_mib * MIB or None,
                disk=Link(storage.disk_base_ms, storage.disk_ms_per_mib),
                store=Link(storage.store_base_ms, storage.store_ms_per_mib),
            ),
            max_step_tokens=self.engine.max_step_tokens,
            max_loras=self.engine.max_loras,
            prefix_cache=self.engine.prefix_cache,
        )


A10_BYTES = 24_000_000_000


def a10_llama2_7b() -> Profile:
    """CaraServe's worker: Llama-2-7B on an A10, 2 GiB of it for adapters."""
    adapter_bytes = 2 << 30
    return Profile(
        motet_profile=VERSION,
        name="Llama-2-7B on an A10 (CaraServe)",
        limits=WorkerLimits(
            base_model="llama-2-7b",
            device="cuda",
            max_model_len=4096,
            max_running=64,
            max_waiting=256,
            block_size=16,
            kv_blocks_total=LLAMA2_7B.kv_blocks(A10_BYTES, adapter_bytes=adapter_bytes, block_size=16),
            adapter_bytes_total=adapter_bytes,
            max_lora_rank=128,
        ),
        perf=A10_MBGMV,
    )


def read_profile(path: Path) -> Profile:
    """Raises FileError naming the line and the field."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(path, 1, "", str(error)) from None
    try:
        tree = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        at = str(error).rpartition("(byte ")[2].rstrip(")")
        line = text.encode()[: int(at)].count(b"\n") + 1 if at.isdigit() else 1
        raise FileError(path, line, "", f"not JSON: {error}") from None
    version = tree.get("motet_profile") if isinstance(tree, dict) else None
    if version != VERSION:
        reason = f"version {version!r}; this program reads version {VERSION}"
        raise FileError(path, _line_of(text, "motet_profile"), "motet_profile", reason)
    try:
        profile = msgspec.convert(tree, Profile)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`")
        raise FileError(path, _line_of(text, field), field, reason) from None
    _check(path, text, profile)
    return profile


def write_profile(path: Path, profile: Profile) -> None:
    """Write it as `read_profile` reads it."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


def _check(path: Path, text: str, profile: Profile) -> None:
    """What the types of `shared.model` do not say."""
    for part, least in ((profile.perf, 0.0), (profile.limits, 1)):
        for name, value in msgspec.structs.asdict(part).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not least <= value < float("inf"):
                field = f"{'perf' if part is profile.perf else 'limits'}.{name}"
                raise FileError(path, _line_of(text, field), field, f"{value} is not a finite number from {least:g} up")
    if profile.perf.decode_base_ms + profile.perf.decode_row_ms <= 0 or profile.perf.prefill_token_ms <= 0:
        raise FileError(path, _line_of(text, "perf"), "perf", "a decode step and a prefill token must take some time")


def _line_of(text: str, field: str) -> int:
    """The line of a field given as a path `a.b`, as good as can be told; 1 when it is not there."""
    at = 0
    for name in field.split("."):
        found = text.find(f'"{name}"', at)
        if found < 0:
            break
        at = found
    return text.count("\n", 0, at) + 1
