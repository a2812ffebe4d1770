from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from motet.policies.step.cold_start import AssistRates
from motet.shared.json_files import FileError
from motet.shared.profile import LinkFacts, write_profile
from motet.twin.link import LinkModel
from motet.twin.profile import a10_llama2_7b, read_profile
from motet.twin.steps import MeasuredSteps, PerfSteps
from tests.twin.support import STEPS

WORKER = replace(a10_llama2_7b(), engine_steps=STEPS)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "worker.json"
    write_profile(path, WORKER)
    return path


def test_a_profile_is_read_as_it_was_written(good: Path) -> None:
    assert read_profile(good) == WORKER


def test_a_profile_is_a_worker_of_the_twin(good: Path) -> None:
    spec = read_profile(good).spec()
    assert (
        spec.limits.kv_blocks_total == a10_llama2_7b().limits.kv_blocks_total
        and spec.storage.host_bytes is None
        and spec.options.max_step_tokens == 512
    )
    assert spec.steps == MeasuredSteps(STEPS, WORKER.perf)
    assert isinstance(a10_llama2_7b().spec().steps, PerfSteps)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"motet_profile": 1', '"motet_profile": 7', "motet_profile"),
        ('"motet_profile": 1,', "", "motet_profile"),
        ('"decode_base_ms": 33.5', '"decode_base_ms": "fast"', "perf.decode_base_ms"),
        ('"decode_base_ms": 33.5', '"decode_base_ms": -1', "perf.decode_base_ms"),
        ('"decode_base_ms": 33.5', '"decode_base_ms": 0', "perf"),
        ('"load_base_ms": 1.0', '"load_base_ms": null', "perf.load_base_ms"),
        ('"max_running": 64', '"max_running": 0', "limits.max_running"),
        ('"kernel": "mbgmv"', '"kernel": "magic"', "perf.kernel"),
        ('"schedule_ms": 0.0', '"schedule_ms": -0.5', "steps.schedule_ms"),
        ('"decode_base_ms": 33.5', '"decode_base_ms": NaN', ""),
        ('"decode_base_ms": 33.5', '"decode_base_ms": 1e999', ""),
        ('"pair_ms"', '"pear_ms"', "engine_steps"),
        ('"sampled_ms": 0.1', '"sampled_ms": -0.1', "engine_steps.sampled_ms"),
        ("{", "[", ""),
    ],
)
def test_a_bad_profile_is_refused_with_the_line_and_the_field(good: Path, old: str, new: str, field: str) -> None:
    text = good.read_text()
    assert old in text
    good.write_text(text.replace(old, new, 1))
    with pytest.raises(FileError) as caught:
        read_profile(good)
    assert caught.value.field == field
    if new and field.count(".") == 1:
        assert caught.value.line == text[: text.index(old)].count("\n") + 1


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"pass_ms": (30.0, 0.0, 38.0, 150.0)}, "engine_steps.pass_ms", "must take some time"),
        ({"pass_ms": (30.0, 30.5, 38.0, 37.0)}, "engine_steps.pass_ms", "not take less with more rows in the end"),
        ({"pass_ms": (0.0, 1.0, 2.0, 3.0)}, "engine_steps.pass_ms", "must take some time"),
        ({"pass_ms": (30.0, 30.5, 38.0)}, "engine_steps.pass_ms", "as many numbers as in rows"),
        ({"rows": (1, 16, 16, 512)}, "engine_steps.rows", "ascend"),
        ({"prefill_spread": (1.1, 0.9)}, "engine_steps.prefill_spread", "ascend"),
        ({"prefill_spread": (0.0, 1.0)}, "engine_steps.prefill_spread", "positive"),
        ({"prefill_spread": (1.0,)}, "engine_steps.prefill_spread", "two and more"),
        ({"rows": (16, 1, 64, 512)}, "engine_steps.rows", "ascend"),
        ({"rows": (0, 1, 64, 512)}, "engine_steps.rows[0]", "`int` >= 1"),
    ],
)
def test_numbers_that_are_no_line_or_no_spread_are_refused(
    tmp_path: Path, change: dict[str, Any], field: str, reason: str
) -> None:
    path = tmp_path / "worker.json"
    write_profile(path, replace(WORKER, engine_steps=replace(STEPS, **change)))
    with pytest.raises(FileError, match=re.escape(reason)) as caught:
        read_profile(path)
    name = field.rpartition(".")[2].partition("[")[0]
    assert caught.value.field == field and f'"{name}"' in path.read_text().splitlines()[caught.value.line - 1]


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_profile(tmp_path / "none.json")


def test_a_link_beside_the_steps_is_simulated_as_the_file_says(tmp_path: Path) -> None:
    facts = LinkFacts(
        gb_per_s=12.0,
        layers=32,
        assist_processes=4,
        assist_mib_ms=0.1,
        assist_mib_row_ms=0.02,
        assist_start_ms=0.3,
        assist_core_share=0.5,
        assist_relief=0.25,
    )
    path = tmp_path / "profile.json"
    write_profile(path, replace(WORKER, link=facts))
    link = read_profile(path).spec().link
    assert link == LinkModel(bytes_per_s=12e9, layers=32, assist=AssistRates(4, 0.02, 0.05, 0.1, 0.3, 0.5, 0.25))
    assert a10_llama2_7b().spec().link is None
    path.write_text(path.read_text().replace('"gb_per_s": 12', '"gb_per_s": 0'))
    with pytest.raises(FileError, match=r"link\.gb_per_s"):
        read_profile(path)
