"""The bench of cold starts gives all its figures, from live engines and from the twin."""

from __future__ import annotations

from bench import cpu_assist, cpu_assist_twin
from bench.cpu_assist import Cell
from bench.cpu_assist_rig import WAYS, Answered, Asked, Files, Rig
from bench.models import prompts
from bench.watch import Watch


def test_every_way_answers_a_cold_request_with_all_of_its_tokens() -> None:
    asked = [Asked(0.0, prompts(1, 24, seed=3)[0], 3), Asked(0.0, prompts(1, 40, seed=4)[0], 3)]
    with (
        Files("S", (8,)) as files,
        Rig(files, link_gbps=1.0, processes=1, adapters=4) as rig,
        Rig(files, link_gbps=1.0, processes=0, adapters=4) as whole,
    ):
        cell = cpu_assist.measure(rig, whole, asked, 8, 1, Watch())
    assert set(cell.answers) == {*WAYS, "all cores"}
    for laps in cell.answers.values():
        assert [len(one.times_s) for one in laps[0]] == [3, 3]
        assert all(one.times_s == sorted(one.times_s) for one in laps[0])
    assert cell.link_mib["cached"] == cell.link_mib["all cores"] == 0 < cell.link_mib["assist"] == cell.link_mib["on demand"]
    assert cell.modes["assist"] == {"assist": 2}


def test_ratios_are_taken_within_a_round() -> None:
    def laps(*ttft_s: float) -> list[list[Answered]]:
        return [[Answered([one, one + 1])] for one in ttft_s]

    cell = Cell({"cached": laps(1, 2, 4), "on demand": laps(3, 4, 8), "layer-wise": laps(9, 9, 9), "assist": laps(2, 2, 5)})
    cell.answers["auto"] = laps(2, 2, 6)
    assert cell.beside("on demand", "ttft_ms") == 2
    assert cell.auto_vs_best() == 1


def test_on_the_twin_no_way_beats_adapters_that_are_there_and_assisting_beats_waiting() -> None:
    figures = cpu_assist_twin.paper_scale(quick=True)
    for device in figures.values():
        assert device["cached"] == 1 and min(device.values()) > 0.99
        assert device["auto"] <= 1.02 * device["layer-wise"] < device["on demand"]
