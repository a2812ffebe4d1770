"""Divides this machine's cores among vLLM's processes, where vLLM would not.

vLLM gives each process of a tensor- or pipeline-parallel model a NUMA node of its own, and does not start on a machine that has
fewer nodes than processes. Only vLLM's environment calls `divide_cores`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
UNBOUND = "nobind"
"""vLLM's word for threads that may run on any core."""


def divide_cores(config: Any) -> None:
    """Set vLLM's variable unless the operator has, or vLLM has enough NUMA nodes."""
    from vllm.utils import cpu_resource_utils

    parallel = config.parallel_config
    ranks = int(parallel.world_size * max(1, parallel.data_parallel_size_local))
    if VARIABLE not in os.environ and ranks > len(cpu_resource_utils.get_visible_memory_node()):
        cores: dict[int, list[int]] = {}
        for cpu in cpu_resource_utils.get_allowed_cpu_list():
            cores.setdefault(cpu.physical_core, []).append(cpu.id)
        os.environ[VARIABLE] = shares(cores, ranks)


def shares(cores: Mapping[int, Sequence[int]], ranks: int) -> str:
    """The cores of each of `ranks` processes, in vLLM's notation. `cores`: the logical CPUs of each physical core.

    As vLLM does, one logical CPU of each core is used, unless there are fewer cores than processes.
    """
    cpus = sorted(max(one) for one in cores.values())
    if len(cpus) < ranks:
        cpus = sorted(cpu for one in cores.values() for cpu in one)
    if len(cpus) < ranks:
        return UNBOUND
    ends = [len(cpus) * rank // ranks for rank in range(ranks + 1)]
    return "|".join(",".join(map(str, cpus[begin:end])) for begin, end in pairwise(ends))
