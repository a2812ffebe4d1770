"""Promise: the processes of a parallel vLLM share the machine's cores, each with its own."""

from __future__ import annotations

from motet.services.worker.vllm_engine.cpu_cores import UNBOUND, shares


def test_every_process_has_cores_of_its_own_and_none_is_left_over() -> None:
    assert shares({0: [0], 1: [1]}, 2) == "0|1"
    assert shares({core: [core] for core in range(7)}, 3) == "0,1|2,3|4,5,6"


def test_of_a_core_with_two_threads_one_is_used_unless_cores_are_short() -> None:
    assert shares({core: [core, core + 4] for core in range(4)}, 2) == "4,5|6,7"
    assert shares({0: [0, 1]}, 2) == "0|1"


def test_with_fewer_processors_than_processes_none_is_bound() -> None:
    assert shares({0: [0]}, 2) == UNBOUND
