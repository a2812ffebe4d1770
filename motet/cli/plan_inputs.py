"""What the options of `motet plan` mean: workers, objectives, and changes to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from motet.shared.model import Slo
from motet.twin.planning.kinds import Kind, NativeKind, VllmKind
from motet.twin.planning.loads import Objective
from motet.twin.planning.planner import Offer
from motet.twin.profile import read_profile
from motet.twin.vllm.published import published

VLLM = "vllm:"
"""Before the name of a published calibration in `--worker`."""
MOST_STEPS = 24


def offer(text: str) -> Offer:
    """A worker from PROFILE[,cost=,most=,seats=]. Raises UsageError naming the part, FileError for the profile."""
    profile, *parts = text.split(",")
    values = _pairs("--worker", text, parts, {"cost": (0.0, 1e9), "most": (0.0, 1e6), "seats": (0.0, 4096.0)})
    most, seats = (_count(text, name, values.get(name)) for name in ("most", "seats"))
    return Offer(kind=kind(profile, seats), cost=values.get("cost", 1.0), most=most)


def _count(text: str, name: str, value: float | None) -> int | None:
    if value is not None and value != int(value):
        raise click.UsageError(f"--worker {text}: {name}: {value:g} is not a whole number")
    return None if value is None else int(value)


def kind(profile: str, seats: int | None = None) -> Kind:
    """The kind of worker of a profile, or of a published calibration with so many seats. Raises UsageError, FileError."""
    if profile.startswith(VLLM):
        name = profile.removeprefix(VLLM)
        try:
            calibration = published(name)
        except ValueError as error:
            raise click.UsageError(f"--worker {profile}: {error}") from None
        if seats is None:
            return VllmKind(name=profile, calibration=calibration)
        return VllmKind(name=f"{profile},seats={seats}", calibration=calibration, seats=seats)
    if seats is not None:
        raise click.UsageError(f"--worker {profile}: seats is for {VLLM} workers; a profile has its own, limits.max_running")
    path = Path(profile)
    if not path.is_file():
        raise click.UsageError(f"--worker {profile}: there is no such file; a published calibration is {VLLM}NAME@GPU")
    read = read_profile(path)
    if read.images is not None:
        raise click.UsageError(f"--worker {profile}: it draws pictures; only workers that generate text are planned")
    return NativeKind(name=path.stem, profile=read)


def objectives(texts: Sequence[str]) -> dict[str, Objective]:
    """Objectives by class, from CLASS:ttft=,tpot=,share=. Without any, the class that requests have by default."""
    found: dict[str, Objective] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        if not colon or not name:
            raise click.UsageError(f"--slo {text}: not CLASS:ttft=MS,tpot=MS,share=SHARE")
        if name in found:
            raise click.UsageError(f"--slo {text}: the class {name} is there twice")
        ranges = {"ttft": (0.0, 1e9), "tpot": (0.0, 1e9), "share": (0.0, 1.0)}
        values = _pairs("--slo", text, rest.split(",") if rest else [], ranges)
        usual = Slo()
        slo = Slo(
            slo_class=name,
            ttft_slo_ms=values.get("ttft", usual.ttft_slo_ms),
            tpot_slo_ms=values.get("tpot", usual.tpot_slo_ms),
        )
        found[name] = Objective(slo=slo, share=values.get("share", Objective(slo=slo).share))
    return found or {Slo().slo_class: Objective(slo=Slo())}


def _pairs(option: str, text: str, parts: Sequence[str], ranges: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if name not in ranges or not equals:
            raise click.UsageError(f"{option} {text}: {part!r} is none of {', '.join(f'{name}=' for name in ranges)}")
        if name in found:
            raise click.UsageError(f"{option} {text}: {name} is there twice")
        found[name] = number(f"{option} {text}: {name}", value, *ranges[name])
    return found


def number(where: str, text: str, above: float, most: float) -> float:
    """The number in a text, above a limit and at most another. Raises UsageError."""
    try:
        value = float(text)
    except ValueError:
        raise click.UsageError(f"{where}: {text!r} is not a number") from None
    if not math.isfinite(value) or not above < value <= most:
        raise click.UsageError(f"{where}: {text} is not above {above:g} and up to {most:g}")
    return value


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change to a plan's question. `label` is what the user wrote."""

    label: str
    rate: float = 1.0
    lose: int = 0
    worker: Offer | None = None
    slo: Objective | None = None


def changes(texts: Sequence[str]) -> list[Change]:
    """The changes of `--what-if`: rate=F, rate=A..B, lose=N, worker=PROFILE[,...], slo=CLASS:.... Raises UsageError."""
    found: list[Change] = []
    for text in texts:
        name, _, value = text.partition("=")
        if name == "rate" and ".." in value:
            low, _, high = value.partition("..")
            first, last = (number(f"--what-if {text}", part, 0.0, 1e6) for part in (low, high))
            if not first < last:
                raise click.UsageError(f"--what-if {text}: {first:g} is not below {last:g}")
            steps = [first + (last - first) * step / 10 for step in range(11)]
            found += [Change(label=f"rate={rate:g}", rate=rate) for rate in steps]
        elif name == "rate":
            found.append(Change(label=text, rate=number(f"--what-if {text}", value, 0.0, 1e6)))
        elif name == "lose":
            lose = number(f"--what-if {text}", value, 0.0, 1e6)
            if lose != int(lose):
                raise click.UsageError(f"--what-if {text}: {value} is not a whole number")
            found.append(Change(label=text, lose=int(lose)))
        elif name == "worker":
            found.append(Change(label=text, worker=offer(value)))
        elif name == "slo":
            (objective,) = objectives([value]).values()
            found.append(Change(label=text, slo=objective))
        else:
            raise click.UsageError(f"--what-if {text}: it is none of rate=, lose=, worker=, slo=")
    if len(found) > MOST_STEPS:
        raise click.UsageError(f"--what-if: {len(found)} cases are more than {MOST_STEPS}")
    return found


def changed_objectives(old: tuple[Objective, ...], new: Objective) -> tuple[Objective, ...]:
    """The objectives with one class's changed. Raises UsageError if the class is not there."""
    if new.slo.slo_class not in (one.slo.slo_class for one in old):
        raise click.UsageError(f"--what-if slo: no adapter has the class {new.slo.slo_class}")
    return tuple(new if one.slo.slo_class == new.slo.slo_class else one for one in old)
