"""Promise: the merging that Motet is compared with gives every adapter its turn."""

from __future__ import annotations

import random

from bench.rivals.merging import AlwaysMerged


def test_always_merged_gives_every_adapter_its_turn() -> None:
    one, draw = AlwaysMerged(turn=10), random.Random(0)
    here, computed = {"": 3, "a": 9, "b": 1}, {"": 0, "a": 0, "b": 0}
    for _ in range(300):
        mode = one.choose(here, here, 100)
        assert mode.only is not None and len(mode.only) == 1
        (only,) = mode.only
        assert mode.merged == only
        computed[only] += 1
        one.ran(draw.choice((1, 1, 2)))
    assert min(computed.values()) > 50


def test_always_merged_ends_a_turn_after_its_steps_and_not_before() -> None:
    one = AlwaysMerged(turn=3)

    def merged(here: dict[str, int], steps: int) -> str:
        modes = []
        for _ in range(steps):
            modes.append(one.choose(here, here, 100).merged)
            one.ran(1)
        return "".join(modes)

    assert merged({"a": 1, "b": 9}, steps=8) == "aaabbbaa"
    assert merged({"b": 9}, steps=5) == "bbbbb", "a turn ends early when its adapter has no requests"
