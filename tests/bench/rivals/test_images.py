"""Promise: the rivals of Motet's order of image steps keep to their rules and starve nobody."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench import images_arrivals
from bench.images_arrivals import RIVALS, Outcome, Rival, figures, ratio, simulated
from bench.rivals.images import EqualLargest, EqualOldest, EqualStay, FirstCome, OneAtATime
from motet.policies.step.image_batch import ImagePlan
from motet.twin.cluster import Cluster
from motet.twin.image_traces import Prompt, draw_prompts
from motet.twin.run import Drawn

Steps = list[tuple[str | None, list[Drawn]]]


def steps_of(rival: Rival, prompts: list[Prompt], arrival_s: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """All plans of a run in which every request ends."""
    seen: Steps = []

    def watched(self: Cluster, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]

        def note(plan: ImagePlan[Drawn]) -> None:
            seen.append((plan.stage, list(plan.requests)))

        self.workers[0].engine.plans = note

    init = Cluster.__init__
    monkeypatch.setattr(images_arrivals.Cluster, "__init__", watched)
    cluster, _, _ = simulated("launches", prompts, arrival_s, rival)
    assert (cluster.metrics.end_ps > 0).all()
    return seen


@pytest.fixture
def prompts() -> list[Prompt]:
    return draw_prompts(np.random.default_rng(1), 60, np.full(6, 1 / 6), repeats=0.3, steps=6, pictures=(1, 1, 4))


ARRIVALS = np.cumsum(np.random.default_rng(2).exponential(0.2, size=60))


@pytest.mark.parametrize("kind", [EqualOldest, EqualStay, EqualLargest])
def test_a_step_of_equal_batches_has_one_set_of_adapters(
    kind: type, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [lives for stage, lives in steps_of(Rival(kind), prompts, ARRIVALS, monkeypatch) if stage == "denoise"]
    assert all(len({live.adapters for live in lives}) == 1 for lives in steps)
    assert max(map(len, steps)) > 2


def test_mixed_batches_mix_and_one_at_a_time_is_one(prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = [lives for stage, lives in steps_of(Rival(FirstCome), prompts, ARRIVALS, monkeypatch) if stage == "denoise"]
    assert any(len({live.adapters for live in lives}) > 1 for lives in mixed)
    single = [
        lives for stage, lives in steps_of(Rival(OneAtATime, "none"), prompts, ARRIVALS, monkeypatch) if stage == "denoise"
    ]
    assert {len(lives) for lives in single} == {1}


def test_a_batch_that_stays_runs_to_its_end_before_the_next(prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [lives for stage, lives in steps_of(Rival(EqualStay), prompts, ARRIVALS, monkeypatch) if stage == "denoise"]
    for before, after in itertools.pairwise(steps):
        assert set(after) <= set(before) or not set(after) & set(before)


def test_the_figures_compare_with_the_best_of_the_equal_batches_and_name_the_worst_case() -> None:
    def outcomes(mean_s: float, p99_s: float) -> dict[str, Outcome]:
        return {name: Outcome(10.0, 20.0, 0.5, 1) for name in RIVALS} | {
            "equal, stay": Outcome(8.0, 30.0, 0.5, 1),
            "motet": Outcome(mean_s, p99_s, 0.9, 1),
        }

    assert ratio(outcomes(4.0, 10.0)) == (0.5, 0.5)
    found = figures({("launches", "order", 0.9): outcomes(4.0, 10.0), ("products", "order", 1.5): outcomes(8.8, 18.0)})
    assert (found["mean_vs_equal"], found["p99_vs_equal"]) == (0.5, 0.5)
    assert (found["worst_mean_vs_equal"], found["worst_mean_at"]) == (1.1, ["products", "order", 1.5])
    assert (found["worst_p99_vs_equal"], found["worst_p99_at"]) == (0.9, ["products", "order", 1.5])
