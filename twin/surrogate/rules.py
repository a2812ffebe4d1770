"""The rules that come with the package: the small trees of each published calibration, and how good they are.

    python -m bench planner_models --runs DIR --write twin/surrogate/rules.json

writes them. They know the paper's features only, so they hold for its lengths, and for as many seats as it gave a worker.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from motet.policies.plan.surrogate import Trees

FILE = Path(__file__).with_name("rules.json")


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The two small trees of a calibration; fields as in the file."""

    throughput: Trees  # tokens/s
    starvation: Trees  # probability
    prompt_tokens: float  # mean of the runs
    output_tokens: float
    seats: int
    simulated_runs: int  # learned from these,
    forest_runs: int  # and from what the forest says of these
    measured_runs: int  # on which the errors were found
    smape_percent: float
    f1: float


def rules(name: str) -> Rules:
    """The rules of a published calibration. Raises ValueError for another name."""
    found = _all().get(name)
    if found is None:
        raise ValueError(f"there are no rules of {name!r}; there are those of {', '.join(sorted(_all()))}")
    return found


@cache
def _all() -> dict[str, Rules]:
    return decode(FILE.read_bytes())


def decode(data: bytes) -> dict[str, Rules]:
    """Rules by calibration, from JSON. Raises msgspec.ValidationError or msgspec.DecodeError, with the field."""
    return msgspec.json.decode(data, type=dict[str, Rules])


def encode(found: dict[str, Rules]) -> bytes:
    """The same as JSON, a line for each calibration."""
    lines = (f"{msgspec.json.encode(name).decode()}: {msgspec.json.encode(one).decode()}" for name, one in found.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
