"""Promise: step times are the linear functions of CaraServe section 5, the same for one worker and for many."""

from __future__ import annotations

import msgspec
import numpy as np

from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.worker_table import PerfColumns
from motet.policies.times.perf_model import MIB, decode_ms, load_ms, lora_load, prefill_ms
from tests.support_worker import PERF, worker_limits


def test_the_bgmv_load_is_rows_times_largest_rank_and_the_mbgmv_load_is_the_sum_of_ranks():
    assert lora_load("bgmv", [8, 64, 0, 16]) == 4 * 64
    assert lora_load("mbgmv", [8, 64, 0, 16]) == 88
    assert lora_load("bgmv", []) == lora_load("mbgmv", []) == 0


def test_step_times_by_hand():
    assert prefill_ms(PERF, 100.0, 32.0) == 4.0 + 0.1 * 100 + 0.02 * 32
    assert decode_ms(PERF, 4.0, 120.0) == 10.0 + 0.2 * 4 + 0.01 * 120
    assert load_ms(PERF, 8.0 * MIB) == 1.0 + 0.5 * 8


def test_many_workers_at_once_get_what_each_gets_alone():
    state = ClusterState()
    perfs = [PERF, msgspec.structs.replace(PERF, kernel="bgmv", decode_lora_ms=0.5)]
    for number, perf in enumerate(perfs):
        state.put_worker(f"w{number}", worker_limits(), perf)
    columns = PerfColumns({name: column[[state.row("w0"), state.row("w1")]] for name, column in state.table.items()})
    ranks = [8, 8, 32]
    load = columns.lora_load(np.array([3.0, 3.0]), np.array([48.0, 48.0]), np.array([32.0, 32.0]))
    assert load.tolist() == [lora_load(perf.kernel, ranks) for perf in perfs]
    assert decode_ms(columns, np.array([3.0, 3.0]), load).tolist() == [
        decode_ms(perf, 3.0, lora_load(perf.kernel, ranks)) for perf in perfs
    ]
