"""Promise: `motet status` shows every kind of worker with the figures that mean something for it."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from motet.cli import status
from motet.cli.main import cli

WORKER: dict[str, Any] = {
    "worker_id": "worker-1",
    "draining": False,
    "stale": False,
    "engine": "native",
    "device": "cpu",
    "capabilities": [],
    "running": 3,
    "max_running": 64,
    "waiting": 1,
    "in_flight": 0,
    "max_waiting": 256,
    "kv_blocks_free": 50,
    "kv_blocks_total": 100,
    "adapter_bytes_free": 75,
    "adapter_bytes_total": 100,
    "adapters_on_device": 2,
    "adapters_on_host": 1,
    "adapters_placed": 0,
}


def shown(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    answer = {
        "gateway": {"id": "gateway-1", "inflight": 4, "not_ready": []},
        "base_model": "base",
        "adapters": 16,
        "scheduler_id": "scheduler-1",
        "workers": [WORKER | changes],
        "absent_workers": [],
        "error": None,
    }
    monkeypatch.setattr(status, "ask", lambda *_: answer)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, ["status"])
    assert result.exit_code == 0, result.output
    return next(line for line in result.output.splitlines() if line.startswith("worker-1"))


def test_a_worker_for_texts_shows_its_kv_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert " ".join(shown(monkeypatch).split()) == "worker-1 ready native cpu 3 / 64 1 / 256 50% 25% 2 / 1 / 0"


def test_a_worker_that_draws_has_no_kv_blocks_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    line = shown(monkeypatch, engine="images", kernels="cpu", capabilities=["draws"])
    assert " ".join(line.split()) == "worker-1 ready images kernels:cpu +draws cpu 3 / 64 1 / 256 - 25% 2 / 1 / 0"


def test_what_is_asked_of_the_mesh_is_a_line_for_each_base_model() -> None:
    asked = {"base_model": "base", "requests_s": 12.34, "prompt_tokens_s": 2500.0, "output_tokens_s": 800.0, "adapters": 3}
    quiet = asked | {"refused_s": 0.0, "missing": []}
    assert status.demand_lines([quiet, quiet | {"refused_s": 0.5, "missing": ["s2"], "adapters": 1}]) == [
        "base is asked for 12.3 requests/s of 3 adapters, 2,500 + 800 tokens/s",
        "base is asked for 12.3 requests/s of 1 adapter, 2,500 + 800 tokens/s, 0.5 refused/s; without the reports of s2",
    ]
