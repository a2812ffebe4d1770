"""A plug-in that gives Motet's policy without one of its parts a name, so that live schedulers can be started with it."""

from __future__ import annotations

from functools import partial

from bench.rivals.parts import ABLATIONS
from motet.policies.cluster.choice import Choose
from motet.policies.cluster.dispatch import POLICIES


def _the(choose: Choose) -> Choose:
    return choose


for _name, _choose in ABLATIONS.items():
    POLICIES.add(_name, partial(_the, _choose))
