"""A simulated network between processes, which may be dead, frozen (their messages wait) or cut off (they are lost)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from motet.twin.events import MESSAGE, PS_PER_S, Events, to_ps

HOP_MS = 0.3
Kind = Literal["worker", "scheduler", "gateway"]


class Process:
    """A process as the network sees it. `generation` counts its starts."""

    def __init__(self, kind: Kind, index: int) -> None:
        self.kind, self.index = kind, index
        self.generation = 0
        self.dead, self.frozen_ps, self.cut_ps = False, 0, 0
        self.down_s: float | None = None  # since when it cannot renew a lease
        self.lossy_ps = self.deaf_ps = 0  # until when its frames are lost, repeated and late, and its answers lost

    def kill(self, now_s: float) -> None:
        """It dies."""
        self.dead, self.down_s = True, now_s

    def restart(self) -> None:
        """Another one takes its place."""
        self.generation += 1
        self.dead, self.down_s, self.frozen_ps, self.cut_ps = False, None, 0, 0
        self.begin()

    def begin(self) -> None:
        """A new process begins, with an empty state."""


class Network:
    """Carries messages between processes. All chance of a mesh is in `random`."""

    def __init__(self, seed: int) -> None:
        self.events, self.random = Events(), np.random.default_rng(seed)

    def after(self, delay_s: float, then: Callable[..., None], *args: Any) -> None:
        """Call `then(*args)` after this time."""
        self.at(self.events.now_s + delay_s, then, *args)

    def at(self, at_s: float, then: Callable[..., None], *args: Any) -> None:
        """Call `then(*args)` at this time, or now if it is over."""
        self.events.at(max(self.events.now_ps, round(at_s * PS_PER_S)), MESSAGE, then, *args)

    def send(
        self,
        source: Process,
        to: Process,
        then: Callable[..., None],
        *args: Any,
        late_s: float = 0.0,
        nobody: Callable[[], None] | None = None,
    ) -> None:
        """Call `then(*args)` at the other process, if the message gets there. `nobody`: at the sender, if that is dead."""
        events = self.events
        if source.dead or source.cut_ps > events.now_ps:
            return
        leaves_ps = max(events.now_ps, source.frozen_ps) + to_ps(HOP_MS) + round(late_s * PS_PER_S)
        events.at(leaves_ps, MESSAGE, self._deliver, to, to.generation, then, args, nobody)

    def tell(self, to: Process, then: Callable[..., None], *args: Any) -> None:
        """Call `then(*args)` at the other process at once, or when it moves again. Nothing is told if it is dead or cut off."""
        self._deliver(to, to.generation, then, args, None)

    def _deliver(
        self, to: Process, generation: int, then: Callable[..., None], args: Any, nobody: Callable[[], None] | None
    ) -> None:
        if to.dead or to.generation != generation:
            if nobody is not None:
                nobody()
        elif to.frozen_ps > self.events.now_ps:
            self.events.at(to.frozen_ps, MESSAGE, self._deliver, to, generation, then, args, nobody)
        elif to.cut_ps <= self.events.now_ps:
            then(*args)
