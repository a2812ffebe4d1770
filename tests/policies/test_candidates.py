"""Promise: a worker that cannot serve a request is never chosen, and the reason is known."""

from __future__ import annotations

import random

import pytest

from motet.policies.cluster.candidates import Ask, candidates, screen
from motet.policies.cluster.cluster_state import ClusterState
from tests.policies.test_cluster_state import brief
from tests.support_worker import PERF, worker_limits

STALE_S = 3.0
NOW_S = 100.0


def cluster(**limits) -> ClusterState:
    """Two workers: "ok" is as usual, "odd" has other limits."""
    state = ClusterState()
    for worker_id, changed in (("ok", {}), ("odd", limits)):
        state.put_worker(worker_id, worker_limits(**changed), PERF)
        state.heard(worker_id, NOW_S, kv_blocks_free=512, draining=False)
    return state


def ask(**changed) -> Ask:
    return Ask(**({"base_model": "demo", "rank": 8, "tokens": 100, "tpot_slo_ms": 200.0} | changed))


def who(state: ClusterState, request: Ask, now_s: float = NOW_S) -> list[str]:
    return sorted(state.ids[row] for row in candidates(state, request, now_s, STALE_S).nonzero()[0])


def test_both_of_two_fitting_workers_are_candidates():
    assert who(cluster(), ask()) == ["odd", "ok"]
    assert who(cluster(), ask(base_model="other")) == []
    assert who(ClusterState(), ask()) == []


def test_a_worker_that_was_never_heard_is_no_candidate():
    state = cluster()
    assert who(state, ask()) == ["odd", "ok"]
    state.put_worker("new", worker_limits(), PERF)
    assert who(state, ask()) == ["odd", "ok"]
    state.heard("new", NOW_S, kv_blocks_free=512, draining=False)
    assert who(state, ask()) == ["new", "odd", "ok"]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_model_len": 100}, "max_model_len"),  # 100 tokens leave no room for one more
        ({"kv_blocks_total": 6}, "kv_memory"),  # 96 tokens
        ({"max_lora_rank": 4}, "lora_rank"),
        ({"max_running": 1, "max_waiting": 1}, "full"),
    ],
)
def test_a_worker_whose_limits_do_not_fit_is_no_candidate(limits, reason):
    state = cluster(**limits)
    for request_id in ("a", "b"):
        state.put_request("odd", brief(request_id, 8, "running"))
    assert who(state, ask()) == ["ok"]
    state.drop_worker("ok")
    assert screen(state, ask(), NOW_S, STALE_S).rejected == {reason: 1}


def test_limits_are_inclusive():
    state = cluster(max_model_len=101, kv_blocks_total=7, max_lora_rank=8, max_running=1, max_waiting=1)
    state.put_request("odd", brief("a", 8, "running"))
    assert who(state, ask()) == ["odd", "ok"]


def test_another_base_model_is_not_served():
    assert who(cluster(base_model="other"), ask()) == ["ok"]
    assert who(cluster(base_model="other"), ask(base_model="other")) == ["odd"]


def test_draining_refusing_silent_and_tried_workers_are_no_candidates():
    state = cluster()
    state.set_draining("odd")
    assert who(state, ask()) == ["ok"]
    state.heard("odd", NOW_S, kv_blocks_free=512, draining=False)
    assert who(state, ask()) == ["odd", "ok"]
    state.set_refusing("odd")
    assert who(state, ask()) == ["ok"]
    state.heard("odd", NOW_S, kv_blocks_free=512, draining=False)
    state.heard("ok", NOW_S + 2, kv_blocks_free=512, draining=False)
    assert who(state, ask(), NOW_S + 3) == ["odd", "ok"]
    assert who(state, ask(), NOW_S + 3.5) == ["ok"]
    assert who(state, ask(tried=("ok", "nobody"))) == ["odd"]


def test_a_worker_that_reports_again_is_a_candidate_while_others_are_held_back():
    state = cluster()
    for hold_back in (state.set_refusing, state.set_draining):
        hold_back("odd")
        state.heard("odd", NOW_S, kv_blocks_free=512, draining=False)
        hold_back("ok")
        assert who(state, ask()) == ["odd"]
        state.heard("ok", NOW_S, kv_blocks_free=512, draining=False)


def test_workers_to_avoid_are_the_last_resort():
    state = cluster()
    assert who(state, ask(avoid=("ok", "nobody"))) == ["odd"]
    assert who(state, ask(avoid=("ok", "odd"))) == ["odd", "ok"]
    state.set_draining("odd")
    assert who(state, ask(avoid=("ok",))) == ["ok"]
    assert who(state, ask(avoid=("ok",), tried=("ok",))) == []


def test_a_request_goes_only_to_workers_with_the_capabilities_that_it_needs():
    state = cluster(capabilities=("structured", "a word of a newer version"))
    assert who(state, ask(needs={"structured": "regex"})) == ["odd"]
    assert who(state, ask(needs={"structured": "regex", "prompt_logprobs": "echo"})) == []
    assert who(state, ask(needs={"a word of a newer version": "x"})) == []  # this side cannot know what it means
    assert who(state, ask()) == ["odd", "ok"]
    state.drop_worker("odd")
    assert who(state, ask(needs={"structured": "regex"})) == []


def test_a_pooling_model_gets_the_requests_for_embeddings_and_no_others():
    state = cluster(capabilities=("embeddings",))
    assert who(state, ask()) == ["ok"]
    assert who(state, ask(needs={"embeddings": "model"})) == ["odd"]
    assert who(state, ask(needs={"structured": "regex"})) == []
    state.drop_worker("ok")
    assert (who(state, ask()), screen(state, ask(), NOW_S, STALE_S).rejected) == ([], {"capability": 1})
    state.put_worker("odd", worker_limits(), PERF)  # restarted with another model
    state.heard("odd", NOW_S, kv_blocks_free=512, draining=False)
    assert who(state, ask()) == ["odd"]


def test_a_worker_that_draws_gets_the_requests_for_pictures_and_no_others():
    state = cluster(capabilities=("draws",))
    assert who(state, ask()) == ["ok"]
    assert who(state, ask(needs={"draws": "model"})) == ["odd"]
    assert who(state, ask(needs={"embeddings": "model"})) == []
    state.drop_worker("ok")
    found = screen(state, ask(), NOW_S, STALE_S)
    assert (who(state, ask()), found.rejected, found.exclusive) == ([], {"capability": 1}, ("draws",))
    state.put_worker("odd", worker_limits(), PERF)  # restarted with another model
    state.heard("odd", NOW_S, kv_blocks_free=512, draining=False)
    assert who(state, ask()) == ["odd"] and who(state, ask(needs={"draws": "model"})) == []


def test_of_several_adapters_the_largest_rank_must_fit_and_not_their_sum():
    state = cluster(max_lora_rank=16)
    assert who(state, ask(rank=40, largest_rank=16)) == ["odd", "ok"]
    assert who(state, ask(rank=40, largest_rank=17)) == ["ok"]


def test_an_input_of_an_embedding_may_fill_the_context():
    state = cluster(capabilities=("embeddings",), max_model_len=100)
    assert who(state, ask(needs={"embeddings": "model"}, tokens=100)) == ["odd"]
    assert who(state, ask(needs={"embeddings": "model"}, tokens=101)) == []


def test_screening_names_the_capabilities_that_no_live_worker_has():
    state = cluster(capabilities=("structured",), max_lora_rank=4)
    both = ask(needs={"structured": "regex", "prompt_logprobs": "echo"})
    assert screen(state, both, NOW_S, STALE_S).lacking == ("prompt_logprobs",)
    assert screen(state, both, NOW_S, STALE_S).rejected == {"capability": 2}
    found = screen(state, ask(needs={"structured": "regex"}), NOW_S, STALE_S)
    assert (found.rejected, found.lacking) == ({"capability": 1, "lora_rank": 1}, ())
    assert found.largest_rank == 4  # of the workers that have it
    state.set_heard("odd", NOW_S - 10)
    found = screen(state, ask(needs={"structured": "regex"}), NOW_S, STALE_S)
    assert (found.rejected, found.lacking) == ({"capability": 1, "stale": 1}, ("structured",))


def test_screening_names_the_best_limits_of_live_workers():
    state = cluster(max_model_len=50, max_lora_rank=4, kv_blocks_total=2)
    state.set_heard("ok", NOW_S - 10)
    found = screen(state, ask(), NOW_S, STALE_S)
    assert found.rejected == {"stale": 1, "max_model_len": 1}
    assert (found.longest_context, found.largest_rank) == (32, 4)


def test_whatever_the_limits_and_however_they_change_the_candidates_are_those_that_can_hold_the_request():
    draw = random.Random(11)
    state, limits = ClusterState(), {}
    for _ in range(400):
        worker_id = f"w{draw.randrange(20)}"
        if draw.random() < 0.2:
            state.drop_worker(worker_id)
            limits.pop(worker_id, None)
        else:
            limits[worker_id] = worker_limits(
                base_model=draw.choice(["demo", "other"]),
                max_model_len=draw.choice([64, 1024]),
                kv_blocks_total=draw.choice([4, 512]),
                max_lora_rank=draw.choice([8, 64]),
                capabilities=draw.choice([(), ("structured",), ("prompt_logprobs", "structured"), ("embeddings",)]),
            )
            state.put_worker(worker_id, limits[worker_id], PERF)
            state.heard(worker_id, NOW_S, kv_blocks_free=4, draining=False)
        request = ask(
            tokens=draw.choice([40, 63, 64, 1023]),
            rank=draw.choice([0, 8, 9, 64]),
            base_model=draw.choice(["demo", "x"]),
            needs=draw.choice(
                [{}, {}, {"structured": "regex"}, {"structured": "regex", "prompt_logprobs": "echo"}, {"embeddings": "model"}]
            ),
        )
        needed = request.tokens + (not request.embeds)
        assert who(state, request) == sorted(
            worker_id
            for worker_id, its in limits.items()
            if its.base_model == request.base_model
            and needed <= min(its.max_model_len, its.kv_blocks_total * its.block_size)
            and request.rank <= its.max_lora_rank
            and request.needs.keys() <= set(its.capabilities)
            and request.embeds == ("embeddings" in its.capabilities)
        )


FC1, FC2 = "model.layers.*.fc1", "model.layers.*.fc2"


def test_only_workers_that_can_change_all_layers_of_an_adapter_are_candidates():
    state = cluster(lora_targets=(FC1, FC2))
    assert who(state, ask(targets=(FC1,))) == who(state, ask(targets=(FC1, FC2))) == ["odd"]
    assert who(state, ask()) == ["odd", "ok"]
    assert who(state, ask(targets=(FC1, "lm_head"))) == []
    state.put_worker("ok", worker_limits(lora_targets=(FC1,)), PERF)  # it started again with another engine
    assert who(state, ask(targets=(FC1,))) == ["odd", "ok"]
    assert who(state, ask(targets=(FC2,))) == ["odd"]
    state.drop_worker("odd")
    assert who(state, ask(targets=(FC2,))) == []


def test_a_screening_tells_the_layers_that_no_live_worker_can_change():
    state = cluster(lora_targets=(FC1,))
    found = screen(state, ask(targets=(FC1, FC2, "lm_head")), NOW_S, STALE_S)
    assert found.rejected == {"lora_layers": 2} and found.lacking_layers == (FC2, "lm_head")
    state.put_worker("ok", worker_limits(lora_targets=(FC2,)), PERF)
    found = screen(state, ask(targets=(FC1, FC2)), NOW_S, STALE_S)  # each can be changed, but not on one worker
    assert found.rejected == {"lora_layers": 2} and found.lacking_layers == ()
