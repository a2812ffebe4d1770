"""Promise: a refusal for lateness tells the objectives that the request has, in the words of its kind, and no others."""

from __future__ import annotations

import pytest

from motet.policies.cluster.candidates import Screening
from motet.services.scheduler.refusal import refusal, too_late
from motet.shared.errors import BadRequest, Overloaded, Unavailable
from motet.shared.model import SLO_MAX_MS
from tests.policies.test_dispatch import ask


def test_a_texts_objectives_are_told():
    told = too_late(ask(ttft_slo_ms=500.0, tpot_slo_ms=50.0), 0.25).message
    assert "to have room and to meet 500 ms to the first token and 50 ms per token now; one probably will in 0.2 s" in told


def test_a_pictures_objectives_are_for_steps_and_those_that_it_lacks_are_left_out():
    picture = {"needs": {"draws": "model"}, "ttft_slo_ms": SLO_MAX_MS, "tpot_slo_ms": SLO_MAX_MS}
    for objectives, told in (
        ({"e2e_slo_ms": 600_000.0}, "600000 ms for the whole answer"),
        ({"tpot_slo_ms": 90.0}, "90 ms per step"),
        ({}, "all objectives"),
    ):
        assert f"to have room and to meet {told} now" in too_late(ask(**picture | objectives), 3.0).message


@pytest.mark.parametrize(
    ("rejected", "begun", "error"),
    [
        ({"lora_layers": 2}, False, BadRequest),
        ({"lora_layers": 2, "stale": 1}, False, Unavailable),  # a worker that is silent may be able to
        ({"lora_layers": 2}, True, Unavailable),  # the request ran, so there was one
    ],
)
def test_an_adapter_that_no_worker_can_run_is_refused_with_the_layer(rejected, begun, error):
    asked = ask(targets=("model.layers.*.mlp.fc1", "lm_head"), begun=begun)
    found = refusal(asked, Screening(rejected=rejected, lacking_layers=("lm_head",)), 0.0)
    assert type(found) is error and found.param == "model"
    assert "can run this adapter: its engine would have to change lm_head" in found.message


def test_workers_that_cannot_run_the_adapter_do_not_count_as_full():
    found = refusal(ask(targets=("lm_head",)), Screening(rejected={"lora_layers": 2, "full": 1}), 3.0)
    assert isinstance(found, Overloaded) and "all 1 workers" in found.message
