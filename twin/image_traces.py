"""Requests for pictures from a recorded trace (GenTD26), and workloads of them.

A request of the trace may ask for several pictures of one prompt. Each is a request of the workload, as in the gateway, and
they arrive together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import Generator

from motet.shared.json_files import FileError
from motet.shared.model import ImageParams, Slo
from motet.twin.traces import csv_rows, date, first_line, opened, text, whole
from motet.twin.workload import Floats, Ints, Workload

PROMPT_TOKENS = 77
PICTURES_MAX, STEPS_MAX, USUAL_STEPS = 64, 1000, 30
COLUMNS = ("gmt_create", "num_images_per_prompt", "num_inference_steps", "lora_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of the trace. `adapters`: indices, those of the trace by first appearance."""

    adapters: tuple[int, ...]
    steps: int
    pictures: int
    time_s: float | None = None  # where the trace tells it

    def without_adapters(self) -> Prompt:
        """The same for the base."""
        return replace(self, adapters=())


def read_prompts(path: Path) -> list[Prompt]:
    """All requests of a GenTD26 file, in its order. A number that a row leaves out is the usual one. Raises FileError."""
    found, index = [], dict[str, int]()
    with opened(path) as lines:
        header = first_line(path, lines).split(",")
        if missing := [name for name in COLUMNS if name not in header]:
            raise FileError(path, 1, missing[0], "not a trace of pictures: the column is missing")
        for at, row in csv_rows(path, header, lines):
            names = [name for name in text(path, at, row, "lora_ids").split(";") if name]
            adapters = tuple([index.setdefault(name, len(index)) for name in dict.fromkeys(names)])
            steps, pictures = (
                whole(path, at, row, name, 1, most) if row[name] else usual
                for name, most, usual in (
                    ("num_inference_steps", STEPS_MAX, USUAL_STEPS),
                    ("num_images_per_prompt", PICTURES_MAX, 1),
                )
            )
            found.append(Prompt(adapters, steps, pictures, date(path, at, row, "gmt_create") if row["gmt_create"] else None))
    return found


def most_used(prompts: Sequence[Prompt], adapters: int) -> list[Prompt]:
    """The requests that use no others than the most used adapters, and at least one; these are numbered by use."""
    uses = Counter(one for prompt in prompts for one in prompt.adapters)
    kept = {digest: place for place, (digest, _) in enumerate(uses.most_common(adapters))}
    return [
        Prompt(tuple([kept[one] for one in prompt.adapters]), prompt.steps, prompt.pictures, prompt.time_s)
        for prompt in prompts
        if prompt.adapters and all(one in kept for one in prompt.adapters)
    ]


def draw_prompts(
    rng: Generator,
    count: int,
    shares: Floats,
    *,
    repeats: float = 0.44,
    steps: int = USUAL_STEPS,
    pictures: Sequence[int] = (1,),
) -> list[Prompt]:
    """Requests with one adapter each, drawn by share, or with a chance of `repeats` that of the request before."""
    drawn = rng.choice(len(shares), size=count, p=shares)
    for at in np.flatnonzero(rng.random(count) < repeats).tolist():
        drawn[at] = drawn[at - 1] if at else drawn[at]
    return [Prompt((one,), steps, int(rng.choice(pictures))) for one in drawn.tolist()]


def workload_of(
    prompts: Sequence[Prompt],
    arrival_s: Floats,
    *,
    ranks: Ints,
    adapter_bytes: Ints,
    size: tuple[int, int] = (512, 512),
    guidance: float = 7.5,
    slo: Slo = Slo(),  # noqa: B008 (frozen)
) -> tuple[Workload, Ints]:
    """A workload of these requests at these times, of pictures of `size` (width, height); and the request of each picture."""
    kinds = {(one.steps, one.pictures): None for one in prompts}
    place = {kind: at for at, kind in enumerate(kinds)}
    counts = np.array([one.pictures for one in prompts])
    of = np.repeat(np.arange(len(prompts)), counts)
    asked = [prompts[at] for at in of.tolist()]
    workload = Workload(
        arrival_s=arrival_s[of],
        adapter=np.array([one.adapters[0] if one.adapters else -1 for one in asked]),
        more=[one.adapters[1:] for one in asked],
        prompt_tokens=np.full(len(of), PROMPT_TOKENS),
        output_tokens=np.array([one.steps + 1 for one in asked]),
        ranks=ranks,
        adapter_bytes=adapter_bytes,
        image=np.array([place[one.steps, one.pictures] for one in asked]),
        images=tuple(
            ImageParams(width=size[0], height=size[1], steps=steps, guidance=guidance, pictures=pictures)
            for steps, pictures in kinds
        ),
        slos=(slo,),
    )
    return workload, of
