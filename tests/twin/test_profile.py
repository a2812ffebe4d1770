from __future__ import annotations

from pathlib import Path

import pytest

from shared.profile import FileError, write_profile
from twin.profile import a10_llama2_7b, read_profile


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "worker.json"
    write_profile(path, a10_llama2_7b())
    return path


def test_a_profile_is_read_as_it_was_written(good: Path) -> None:
    assert read_profile(good) == a10_llama2_7b()


def test_a_profile_is_a_worker_of_the_twin(good: Path) -> None:
    spec = read_profile(good).spec()
    assert (
        spec.limits.kv_blocks_total == a10_llama2_7b().limits.kv_blocks_total
        and spec.storage.host_bytes is None
        and spec.max_step_tokens == 512
    )


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


def test_a_profile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_profile(tmp_path / "none.json")
