"""Promise: a refusal for lateness tells the objectives that the request has, in the words of its kind, and no others."""

from __future__ import annotations

from motet.services.scheduler.refusal import too_late
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
