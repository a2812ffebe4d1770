"""A worker's profile: measurements of a live worker in a file, used by workers at start and by the twin.

    {"motet_profile": 1, "limits": {...}, "perf": {...}, "fit": {...}, "steps": {...}, "engine_steps": {...}, "engine": {...},
     "storage": {...}, "merge": {...}, "link": {...}, "hops": {...}}

`limits`, `perf` and `engine_steps` are `shared.model`'s WorkerLimits, PerfModel and EngineSteps; all but the first two are
optional. Times must be finite and not negative, and a decode step must take more than zero. `motet profile` writes profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from motet.shared.json_files import FileError, line_of, read_versioned
from motet.shared.model import EngineSteps, ImageSteps, PerfModel, WorkerLimits
from motet.shared.worker_options import WorkerOptions

VERSION = 1
MAY_BE_ZERO = {"kv_block_bytes", "kv_token_bytes", "adapter_slots", "pin_slots", "pin_bytes"}
"""Limits of which a worker may have none."""


_Ms = Annotated[float, Meta(ge=0)]
_Count = Annotated[int, Meta(ge=1)]


class Steps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a step that the linear models of `perf` do not contain, in milliseconds."""

    schedule_ms: _Ms = 0.0
    waiting_ms: _Ms = 0.0  # per request that waits
    context_token_ms: _Ms = 0.0  # per token in the KV cache of the step's sequences


class StorageTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host and disk tiers of adapters, and times to load into host memory.

    `host_mib` 0: unlimited, with all adapters in it at start. `disk_mib` 0: unlimited."""

    host_mib: Annotated[int, Meta(ge=0)] = 0
    disk_mib: Annotated[int, Meta(ge=0)] = 0
    disk_base_ms: _Ms = 1.0
    disk_ms_per_mib: _Ms = 0.5
    store_base_ms: _Ms = 5.0
    store_ms_per_mib: _Ms = 8.0

    @classmethod
    def of(cls, host_mib: int, disk_mib: int, *, disk: tuple[float, float], store: tuple[float, float]) -> StorageTimes:
        """With fitted times to load from each: milliseconds, and milliseconds per MiB."""
        return cls(
            host_mib=host_mib,
            disk_mib=disk_mib,
            disk_base_ms=disk[0],
            disk_ms_per_mib=disk[1],
            store_base_ms=store[0],
            store_ms_per_mib=store[1],
        )


class Hops(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delays of messages to and from a busy worker."""

    assign_ms: _Ms = 0.0  # a request: from its sender until the worker has taken it
    frame_ms: _Ms = 0.0  # a token: from the end of its step until a gateway has it


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies to the device that run beside the steps, and the CPU LoRA processes (0: none)."""

    gb_per_s: Annotated[float, Meta(gt=0, le=1e5)]
    layers: _Count
    drag: Annotated[float, Meta(ge=0, le=1)] = 0.0  # how much longer steps take beside a copy, as a share of its time
    assist_processes: Annotated[int, Meta(ge=0)] = 0
    assist_mib_ms: _Ms = 0.0  # a core's time to read one MiB of adapter, over all layers
    assist_mib_row_ms: _Ms = 0.0  # and for each row of it
    assist_start_ms: _Ms = 0.0  # and once, until it has begun
    assist_core_share: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of a core that copying takes meanwhile
    assist_relief: Annotated[float, Meta(ge=0, le=1)] = 0.0  # what the device is spared, of the time of a process
    assist_hop_ms: _Ms = 0.05  # per layer: handing rows to processes and back


class MergeFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The merged copy of the weights, of a worker with `--merge on`."""

    copy_mib: Annotated[float, Meta(gt=0)]
    mib_ms: _Ms  # the engine's time to make one MiB of it


class FitFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fit of the linear models of `perf`: coefficients of determination, and amounts of data."""

    r2_prefill: float
    r2_decode: float
    steps: Annotated[int, Meta(ge=0)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole profile of a worker."""

    motet_profile: int
    name: str = ""
    limits: WorkerLimits
    perf: PerfModel
    fit: FitFacts | None = None
    steps: Steps = Steps()
    engine_steps: EngineSteps | None = None  # simulated by instead of `perf` and `steps`, where there
    images: ImageSteps | None = None  # of a worker that draws pictures: simulated by instead of all three
    engine: WorkerOptions = WorkerOptions()
    storage: StorageTimes = StorageTimes()
    hops: Hops = Hops()
    merge: MergeFacts | None = None  # for the option `merge`
    link: LinkFacts | None = None  # None: a step waits for the copies it needs, as `perf` says


P = TypeVar("P", bound=Profile)


def read_profile(path: Path, kind: type[P] = Profile) -> P:  # type: ignore[assignment]
    """Raises FileError naming the line and the field."""
    text, profile = read_versioned(path, kind, "motet_profile", VERSION)
    _check(path, text, profile)
    return profile


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile in the format of `read_profile`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


def _check(path: Path, text: str, profile: Profile) -> None:
    """Checks that the types of `shared.model` do not contain."""
    for part, usual in ((profile.perf, 0.0), (profile.limits, 1)):
        for name, value in msgspec.structs.asdict(part).items():
            least = 0 if name in MAY_BE_ZERO else usual
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not least <= value < float("inf"):
                field = f"{'perf' if part is profile.perf else 'limits'}.{name}"
                raise FileError(path, line_of(text, field), field, f"{value} is not a finite number from {least:g} up")
    if profile.perf.decode_base_ms + profile.perf.decode_row_ms <= 0 or profile.perf.prefill_token_ms <= 0:
        raise FileError(path, line_of(text, "perf"), "perf", "a decode step and a prefill token must take some time")
    _check_images(path, text, profile.images)
    if (steps := profile.engine_steps) is not None:
        for reason, bad in (
            ("as many numbers as in rows are expected", len(steps.pass_ms) != len(steps.rows)),
            ("a pass must take some time", min(steps.pass_ms) <= 0),
            ("a pass must not take less with more rows in the end", _falls(steps.pass_ms[-2:])),
            ("not a finite number", not all(map(isfinite, steps.pass_ms))),
        ):
            if bad:
                raise FileError(path, line_of(text, "engine_steps.pass_ms"), "engine_steps.pass_ms", reason)
        spread = steps.prefill_spread
        if _falls(spread) or not all(value > 0 and isfinite(value) for value in spread) or len(spread) == 1:
            field = "engine_steps.prefill_spread"
            raise FileError(path, line_of(text, field), field, "none, or two and more positive finite numbers that ascend")
        if _falls(steps.rows) or len({*steps.rows}) < len(steps.rows):
            raise FileError(path, line_of(text, "engine_steps.rows"), "engine_steps.rows", "rows must ascend")


def _check_images(path: Path, text: str, images: ImageSteps | None) -> None:
    for at, size in enumerate(images.sizes if images is not None else ()):
        field = f"images.sizes[{at}]"
        if len(size.rows) != len(size.step_ms) or _falls(size.rows) or len({*size.rows}) < len(size.rows):
            raise FileError(
                path, line_of(text, "images.sizes"), f"{field}.rows", "as many as in step_ms are expected, ascending"
            )
        if not all(0 < ms < float("inf") for ms in size.step_ms):
            raise FileError(path, line_of(text, "images.sizes"), f"{field}.step_ms", "positive finite numbers are expected")


def _falls(values: Sequence[float]) -> bool:
    return any(later < earlier for earlier, later in pairwise(values))
