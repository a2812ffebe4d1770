"""The overload bench counts outcomes correctly."""

from __future__ import annotations

import pytest

from bench import overload
from bench.rig.requests import Kind, Request

KIND = Kind(name="interactive", ttft_slo_ms=500.0, tpot_slo_ms=50.0)


def seen(**changed) -> Request:
    fields = {"sent_s": 5.0, "kind": KIND, "wire": b"", "status": 200, "first_s": 5.3, "last_s": 5.7, "tokens": 11}
    return Request(**(fields | changed))


@pytest.mark.parametrize(
    ("changed", "kept"),
    [({}, True), ({"first_s": 5.6}, False), ({"last_s": 6.0}, False), ({"status": 429, "tokens": 0}, False)],
)
def test_a_request_is_kept_when_both_objectives_are(changed: dict, kept: bool) -> None:
    assert seen(**changed).kept == kept


def test_goodput_counts_the_measured_part_only() -> None:
    early = seen(sent_s=0.5, first_s=0.6, last_s=0.9)
    refused = seen(status=429, tokens=0, retry_after_s=2.0, answered_s=5.01)
    row = overload.measures([seen(), early, refused], 4.0, 14.0)
    assert row["goodput_per_s"] == 0.1 and row["refused"] == 0.5 and row["interactive_attainment"] == 0.5
    assert row["refusal_p99_ms"] == pytest.approx(10.0) and row["retry_after_mean_s"] == 2.0
