"""Promise: over a simulated mesh whose processes die, freeze and lose messages, accepted requests end with their own tokens,
each once; and chaos in virtual time would notice an owner that breaks one of its rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from motet.policies.owner import owner_core
from motet.policies.owner.owner_core import OwnerCore
from motet.twin.mesh import Mesh
from tests.chaos.virtual import GATEWAYS, SCHEDULER, SECONDS, SPEC, WORKERS, Result, run_seed, scenario

SEEDS = range(1, 41)


def played(seeds: range) -> Result:
    result = Result()
    for seed in seeds:
        run_seed(seed, result)
    return result


def test_no_request_is_lost_answered_twice_or_changed() -> None:
    result = played(SEEDS)
    assert (result.lost, result.duplicated, result.changed) == (0, 0, 0), result.troubles
    assert result.resumed > len(SEEDS) / 2 and result.moved > 0, "the faults reach the requests"
    assert result.parked > 0, "some come while no worker is there"
    assert result.refused < result.requests / 20


def test_a_seed_gives_the_same_history_again() -> None:
    def history() -> list[Any]:
        workload, faults = scenario(7)
        mesh = Mesh(workload, [SPEC] * WORKERS, SCHEDULER, gateways=GATEWAYS, faults=faults, seed=7)
        mesh.run(SECONDS + 60.0)
        return [(s.request_id, s.epoch, s.losses, s.sign_s, len(s.tokens)) for s in mesh.streams]

    assert history() == history()


def stale_frames_count(self: OwnerCore, worker_id: str, item: Any) -> None:
    owned = self.active.get(item.request_id)
    if owned is not None and item.error is None:
        self._take(owned, item.tokens, item, None)  # private: the rule that is broken on purpose


def known_tokens_count(self: OwnerCore, owned: Any, worker_id: str, item: Any) -> None:
    if item.error is None:
        self._take(owned, item.tokens, item, None)  # private: the rule that is broken on purpose


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        ("_stray", stale_frames_count),
        ("_on_odd_item", known_tokens_count),
        ("_tick", lambda self, *, connected: None),
    ],
    ids=["frames of other epochs count", "known tokens count again", "nobody watches"],
)
def test_a_broken_rule_is_found(broken: str, how: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnerCore, broken, how)
    result = Result()
    for seed in SEEDS:
        try:
            run_seed(seed, result)
        except (AssertionError, KeyError) as error:  # its ledgers do not add up
            result.troubles.append(repr(error))
        if result.troubles:
            return
    raise AssertionError(f"{len(SEEDS)} seeds found nothing")


def test_a_resumption_that_never_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_core, "RESUME_PATIENCE_S", -1.0)
    assert played(SEEDS).lost > 0
