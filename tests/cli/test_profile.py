"""`motet profile` measures an engine and writes a profile that a worker and the twin can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from motet.cli.main import cli
from motet.cli.plan_demand import refuse_pictures
from motet.services.worker.config import WorkerConfig
from motet.services.worker.service import WorkerService
from motet.shared.config import ConfigError
from motet.shared.profile import read_profile, write_profile
from motet.twin.profile import a10_llama2_7b
from motet.twin.profile import read_profile as read_for_twin
from tests.support_models import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama2", tmp_path_factory.mktemp("model"))


def test_a_profile_of_an_engine_is_written_and_read(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "worker.json"
    words = ["profile", "--model", model, "--out", out, "--seconds", 2, "--threads", 1, "--max-running", 4]
    result = CliRunner().invoke(cli, [*map(str, words), "--max-step-tokens", "64", "--lora-memory-mib", "64"])
    assert result.exit_code == 0, result.output
    profile = read_profile(out)
    assert profile.limits.max_running == 4 and profile.engine.max_step_tokens == 64
    assert profile.fit is not None and profile.fit.steps > 100
    perf = profile.perf
    assert perf.prefill_base_ms + perf.prefill_token_ms + perf.prefill_lora_ms > 0  # which of them, a second cannot say
    assert perf.load_base_ms + perf.load_ms_per_mib > 0
    assert 0 < profile.hops.assign_ms < 1000 and 0 < profile.hops.frame_ms < 1000
    assert profile.engine_steps is not None and profile.engine_steps.prefill_spread
    assert "R2 decode" in result.output and str(out) in result.output.replace("\n", "")
    assert read_for_twin(out).spec().perf == perf

    worker = WorkerService(WorkerConfig.of(model=str(model), profile=str(out)))
    assert worker._times.model == perf  # private: it says so on the bus only while it runs


def test_a_worker_refuses_a_profile_that_is_no_profile(model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{\n  "motet_profile": 9\n}')
    with pytest.raises(ConfigError, match=r"--profile: bad.json:2: motet_profile: version 9"):
        WorkerService(WorkerConfig.of(model=str(model), profile=str(bad)))


def test_a_worker_refuses_a_profile_of_another_engine(model: Path, tmp_path: Path) -> None:
    of_vllm = tmp_path / "vllm.json"
    native = a10_llama2_7b()
    write_profile(of_vllm, replace(native, limits=replace(native.limits, engine="vllm")))
    with pytest.raises(
        ConfigError, match=r"--profile: vllm.json was measured with --engine vllm; this worker has --engine native"
    ):
        WorkerService(WorkerConfig.of(model=str(model), profile=str(of_vllm)))
    taken = WorkerService(WorkerConfig.of(model=str(model), engine="vllm", profile=str(of_vllm)))
    assert taken._times.model == native.perf  # private: it says so on the bus only while it runs


@pytest.mark.parametrize("limits", [{"engine": "images"}, {"capabilities": ("draws",)}])
def test_a_worker_that_draws_is_neither_simulated_nor_planned_without_its_times(limits: dict[str, Any], tmp_path: Path) -> None:
    profile, out = a10_llama2_7b(), tmp_path / "drawing.json"
    write_profile(out, replace(profile, limits=replace(profile.limits, **limits)))
    for words in (["simulate", "--profile", str(out)], ["plan", "--adapters", "4", "--worker", str(out)]):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code != 0 and "images: expected of a worker that draws pictures" in result.output


def test_a_mesh_that_draws_is_not_planned() -> None:
    workers = [{"worker_id": "worker-1"}, {"worker_id": "worker-2", "capabilities": ["draws"]}]
    refuse_pictures(workers[:1])
    with pytest.raises(ValueError, match="--from: worker worker-2 draws pictures"):
        refuse_pictures(workers)


def test_what_cannot_be_profiled_is_said_in_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["profile", "--model", str(tmp_path), "--out", str(tmp_path / "p.json")])
    assert result.exit_code == 2 and "motet profile:" in result.output and not (tmp_path / "p.json").exists()
