"""ROCK's decisions are those of its paper: sections 4.1 and 4.2, with the resolutions that each module states."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import DBSCAN
from sklearn.mixture import GaussianMixture

from bench.rivals.rock import layers, matching, mixture, patterns
from bench.rivals.rock.matching import Part


def clouds(count: int, seed: int = 0) -> np.ndarray:
    """Rows of `count` well separated clusters of different shapes and shares."""
    rng = np.random.default_rng(seed)
    parts = []
    for at in range(count):
        shape = rng.normal(size=(2, 2)) * 0.3
        parts.append(rng.normal(size=(60 + 40 * at, 2)) @ shape + 6.0 * np.array([at, (at * 2) % 3]))
    return np.concatenate(parts)


@pytest.mark.parametrize("components", [1, 2, 4])
def test_the_fitted_mixture_is_that_of_scikit_learn_from_the_same_start(components: int) -> None:
    rows = clouds(3)
    begun = mixture.start(rows, components, np.random.default_rng(1))
    ours = mixture.fit(rows, begun)
    theirs = GaussianMixture(
        components,
        reg_covar=mixture.RIDGE,
        tol=mixture.TOLERANCE,
        max_iter=mixture.ROUNDS,
        weights_init=begun.shares,
        means_init=begun.means,
        precisions_init=np.linalg.inv(begun.covariances),
    ).fit(rows)
    assert ours.means == pytest.approx(theirs.means_, rel=1e-6)
    assert ours.shares == pytest.approx(theirs.weights_, rel=1e-6)
    assert ours.covariances == pytest.approx(theirs.covariances_, rel=1e-6)
    assert ours.bic(rows) == pytest.approx(theirs.bic(rows), rel=1e-9)
    assert (ours.labels(rows) == theirs.predict(rows)).all()


@pytest.mark.parametrize("count", [1, 3, 4])
def test_bic_finds_the_number_of_separate_clusters(count: int) -> None:
    assert len(mixture.choose(clouds(count), np.random.default_rng(2)).shares) == count


def tasks(count: int, share_of_long: float, seed: int) -> np.ndarray:
    """Vectors of tasks, of which a share has 50 steps and a large adapter."""
    rng = np.random.default_rng(seed)
    long = rng.random(count) < share_of_long
    steps, mb = np.where(long, 50.0, 20.0), np.where(long, rng.normal(150, 10, count), rng.normal(20, 3, count))
    return patterns.features(steps, mb, np.where(long, 3.0, 1.0), np.where(long, 200.0, 50.0), mean_s=100.0)


def test_patterns_do_not_depend_on_the_units_of_the_features() -> None:
    vectors = tasks(400, 0.4, 1)
    in_kib = vectors * np.array([1.0, 1024.0, 1.0, 1.0])
    first, second = (patterns.Patterns.of(one, np.random.default_rng(5)) for one in (vectors, in_kib))
    assert (first.labels(vectors) == second.labels(in_kib)).all()
    assert len(first.reference) > 1


def test_a_task_that_tolerates_more_delay_is_less_sensitive_to_it() -> None:
    vectors = patterns.features(*np.ones((3, 2)), np.array([50.0, 200.0]), mean_s=100.0)
    assert vectors[:, 3] == pytest.approx(np.exp([-0.5, -2.0]))


def test_the_divergence_is_zero_for_equal_shares_and_that_of_the_formula_otherwise() -> None:
    assert patterns.divergence(np.array([10, 30]), np.array([10, 30])) == 0.0
    p, q = np.array([10.5, 30.5]) / 41, np.array([30.5, 10.5]) / 41
    assert patterns.divergence(np.array([10, 30]), np.array([30, 10])) == pytest.approx((p * np.log(p / q)).sum())


def test_patterns_are_made_again_when_the_mix_shifts_and_hardly_ever_by_chance() -> None:
    rng = np.random.default_rng(8)
    made = patterns.Patterns.of(tasks(600, 0.4, 1), rng)
    alarms = sum(made.shifted(tasks(300, 0.4, 100 + seed), rng) for seed in range(100))
    assert alarms <= 10  # 1% of the samples of the reference, whose shares are themselves from a sample
    assert made.shifted(tasks(300, 0.6, 3), rng)


def test_the_weight_of_a_node_is_formula_1() -> None:
    found = matching.weights(np.array([1.0, 0.5, 0.0]), np.array([0.7, 0.2, 1.2]), np.array([10.0, 20.0, 40.0]))
    inverse = [1.0, (1 / 20 - 1 / 40) / (1 / 10 - 1 / 40), 0.0]
    assert found == pytest.approx([0.6 + 0.3 + 0.1, 0.3 + 0.3 * 0.5 + 0.1 * inverse[1], 0.3 * 0.5])


def test_a_queue_is_split_so_that_no_part_is_above_a_nodes_capacity_and_no_load_is_lost() -> None:
    loads = {"hot": 2.0, "a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
    parts = matching.split(3, loads, 0.7)
    assert all(part.load <= 0.7 + 1e-9 and part.queue == 3 for part in parts)
    assert [sum(part.adapters.get(name, 0.0) for part in parts) for name in loads] == pytest.approx(list(loads.values()))
    assert sum("hot" in part.adapters for part in parts) == 3
    assert all(sum(name in part.adapters for part in parts) == 1 for name in "abcd")


def test_a_part_goes_to_the_node_that_has_its_adapters() -> None:
    cached = [set[str](), {"a", "b"}, set[str](), set[str](), set[str]()]
    use = np.array([0.3, 0.3, 0.3, 0.3, 0.3])
    found = matching.match([Part(0, {"a": 0.2, "b": 0.2})], cached, use, np.ones(5), np.ones((1, 5)))
    assert 1 in found[0] and len(found[0]) == 3


def test_of_the_three_best_nodes_the_one_with_the_least_deviation_is_chosen() -> None:
    cached = [{"a"}, {"a"}, {"a"}, set[str]()]
    use = np.array([0.5, 0.2, 0.6, 0.0])  # the last one would deviate least, but is no candidate
    found = matching.match([Part(0, {"a": 0.3})], cached, use, np.ones(4), np.ones((1, 4)))
    assert sorted(found[0]) == [0, 1, 2]
    assert found[0][0] == 1


def test_parts_that_are_matched_later_see_the_load_of_earlier_ones() -> None:
    parts = [Part(0, {"a": 0.6}), Part(0, {"b": 0.5}), Part(0, {"c": 0.4})]
    found = matching.match(parts, [set[str]()] * 3, np.zeros(3), np.ones(3), np.ones((3, 3)))
    assert sorted(nodes[0] for nodes in found) == [0, 1, 2]


def test_groups_are_those_of_dbscan_and_each_noisy_node_is_one_of_its_own() -> None:
    rng = np.random.default_rng(4)
    rows = np.concatenate([rng.normal(0.2, 0.05, (20, 3)), rng.normal(0.8, 0.05, (15, 3)), rng.random((10, 3)) * 4 + 1])
    ours, theirs = layers.groups(rows), DBSCAN(eps=layers.EPS, min_samples=layers.MIN_SAMPLES).fit(rows).labels_
    assert (ours[theirs >= 0] == theirs[theirs >= 0]).all()
    alone = ours[theirs < 0]
    assert len(alone) and len(set(alone)) == len(alone) and alone.min() > theirs.max()


def test_five_alike_are_noise_and_six_are_a_group() -> None:
    assert len(set(layers.groups(np.zeros((5, 2))).tolist())) == 5
    assert len(set(layers.groups(np.zeros((6, 2))).tolist())) == 1


@pytest.mark.parametrize(
    ("heat", "nodes"), [([60, 30, 10], 10), ([5, 5, 5], 4), ([100, 1, 1, 1], 16), ([1, 2, 3, 4], 3), ([7], 9)]
)
def test_partitions_have_all_nodes_by_heat_and_each_one_at_least_one(heat: list[float], nodes: int) -> None:
    sizes = layers.partition_sizes(heat, nodes)
    assert sum(sizes) == nodes
    if nodes >= len(heat):
        assert min(sizes) >= 1
        exact = [1 + (nodes - len(heat)) * one / sum(heat) for one in heat]
        assert all(abs(size - one) < 1 for size, one in zip(sizes, exact, strict=True))
    assert all(sizes[a] >= sizes[b] for a in range(len(heat)) for b in range(len(heat)) if heat[a] > heat[b])


def test_partitions_without_heat_have_no_node() -> None:
    assert layers.partition_sizes([0, 0], 5) == [0, 0]
    assert layers.partition_sizes([3, 0], 5)[1] == 0


@pytest.mark.parametrize(
    ("uses", "mb", "mean_mb", "wanted"), [(100, 50, 50, 23), (1, 50, 50, 1), (1, 5, 50, 1), (9, 200, 50, 11), (0, 50, 50, 0)]
)
def test_replicas_are_formula_5_and_an_adapter_with_requests_has_one(uses: int, mb: float, mean_mb: float, wanted: int) -> None:
    assert layers.replicas(uses, mb, mean_mb) == wanted


def test_the_score_is_the_mean_of_bandwidth_free_memory_and_nearness() -> None:
    found = layers.scores(np.array([1.0, 0.5]), np.array([0.4, 0.0]), np.array([1.0, 2.0]))
    assert found == pytest.approx([(1.0 + 0.6 + 1.0) / 3, (0.5 + 1.0 + 0.5) / 3])


def test_one_of_three_nodes_is_drawn_with_a_chance_by_the_squared_score() -> None:
    score, rng = np.array([0.2, 0.6, 0.3, 0.1]), np.random.default_rng(6)
    drawn = np.bincount([layers.place(score, rng) for _ in range(20_000)], minlength=4) / 20_000
    assert drawn == pytest.approx([0.04 / 0.49, 0.36 / 0.49, 0.09 / 0.49, 0.0], abs=0.01)
    assert {layers.place(score, rng, squared=False) for _ in range(20)} == {1}
