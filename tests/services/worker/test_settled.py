"""Promise: what `auto` stands for is decided at the start where device, weights and cores say it, and the reason is given."""

from __future__ import annotations

from typing import Any

import pytest

from motet.services.worker.config import WorkerConfig
from motet.services.worker.native.settled import settled, spare_processes
from motet.shared.config import ConfigError
from motet.shared.model import Mechanism

CPU: dict[str, Any] = {"device": "cpu", "quantization": "none", "shares_memory": True}


def of(**options: Any) -> WorkerConfig:
    return WorkerConfig.of(model="m", **options)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"quantization": "int8"}, "the weights are int8"),
        ({"shares_memory": False}, "device memory is fixed"),
        ({"device": "cuda"}, "not measured on a GPU yet"),
    ],
)
def test_auto_does_not_merge_where_it_cannot_and_says_why(facts: dict[str, Any], why: str) -> None:
    config, decided = settled(of(merge="auto"), **CPU | facts)
    assert config.options.merge == "off" and decided["merge"] == Mechanism("off", why)
    asked, decided = settled(of(merge="on"), **CPU | facts)
    assert asked.options.merge == "on" and "merge" not in decided, "the engine refuses it by name"


def test_auto_merges_with_plain_weights_in_shared_memory() -> None:
    config, decided = settled(of(merge="auto"), **CPU)
    assert config.options.merge == "auto" and "merge" not in decided


def test_auto_starts_no_processes_on_a_cpu() -> None:
    config, decided = settled(of(assist_processes="auto"), **CPU)
    assert config.cold.assist_processes == 0 and config.cold.core_ids == ()
    assert decided["assist"] == Mechanism("off", "the engine uses all cores")


def test_auto_starts_as_many_processes_beside_a_gpu_as_cores_are_to_spare() -> None:
    assert [spare_processes(cores) for cores in (1, 4, 5, 8, 64)] == [0, 0, 1, 4, 4]
    config, decided = settled(of(assist_processes="auto"), **CPU | {"device": "cuda"})
    assert config.cold.processes == config.cold.assist_processes
    assert decided["assist"].state == ("on" if config.cold.processes else "off")


def test_a_number_of_processes_and_fixed_options_stay() -> None:
    config = of(assist_processes=3, merge="off")
    assert settled(config, **CPU) == (config, {})


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"merge": "maybe"}, "--merge"),
        ({"adapter_foresight": "true"}, "--adapter-foresight"),
        ({"assist_processes": "some"}, "--assist-processes"),
        ({"assist_processes": -1}, "--assist-processes"),
        ({"queues": "sometimes"}, "--queues"),
    ],
)
def test_a_word_that_an_option_does_not_know_is_refused_by_name(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        of(**options)


def test_numbers_from_the_command_line_are_numbers() -> None:
    assert of(assist_processes="2").cold.assist_processes == 2
    assert of(assist_processes="auto").cold.processes == 0
