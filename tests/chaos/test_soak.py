"""The soak's definition of growth. Promise: load that moves between copies is no growth, a leak is."""

from __future__ import annotations

import pytest

from tests.chaos.soak import KINDS, Samples, report


def samples(**tasks: list[float]) -> Samples:
    return {
        (name.replace("_", "-"), kind): values if kind == "tasks" else [60.0] * 7
        for name, values in tasks.items()
        for kind in KINDS
    }


def test_streams_that_move_from_one_gateway_to_the_other_are_no_growth() -> None:
    assert report(samples(gateway_1=[52, 52, 52, 52, 63, 63, 63], gateway_2=[48, 48, 48, 48, 39, 39, 39])) == 0


def test_tasks_that_add_up_over_both_gateways_are_growth(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(samples(gateway_1=[52, 52, 52, 52, 63, 63, 63], gateway_2=[48] * 7)) == 1
    assert "100 to 111 !" in capsys.readouterr().out


def test_memory_of_one_copy_counts_by_itself() -> None:
    grown = samples(gateway_1=[5.0] * 7, gateway_2=[5.0] * 7)
    grown["gateway-1", "rss_mib"] = [60, 60, 60, 60, 70, 70, 70]
    grown["gateway-2", "rss_mib"] = [60, 60, 60, 60, 50, 50, 50]
    assert report(grown) == 1
