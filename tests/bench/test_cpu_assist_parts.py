"""The microbenches of CPU assist compute what they time: every process answers, and every row comes back computed."""

from __future__ import annotations

import pytest
import torch

from bench import cpu_assist_parts as parts


def test_round_trips_are_measured_for_every_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PROCESSES", (1, 3))
    found = parts.round_trips(quick=True)
    assert [one["processes"] for one in found] == [1, 3]
    assert all(0 < one[f"{way}_ms_p50"] <= one[f"{way}_ms_p95"] for one in found for way in ("shm", "socket"))


def test_processes_compute_what_torch_computes() -> None:
    engine, pool = parts.made_pool()
    adapter = parts.Adapter(pool, parts.GROUPS["qkv"], parts.RANK)
    assist = parts.started(engine, pool, [-1, -1], 8)
    x, y = torch.randn(10, parts.HIDDEN), torch.empty(10, 3 * parts.HIDDEN)
    parts.ask(assist.helpers([], 0).channels, adapter, x.tensor_split(2), y.tensor_split(2), parts.QKV)
    assist.close()
    want = torch.cat([x @ a.float().T @ b.float() for a, b in parts.matrices(adapter)], dim=1)
    assert (y - want).abs().max() <= 2**-7 * want.abs().max()
