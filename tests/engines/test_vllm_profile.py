"""Promise: `motet profile --engine vllm` measures vLLM, and a vLLM worker starts from what it wrote."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from motet.cli.client import Client
from motet.examples.demo import DEMO
from motet.services.worker.config import WorkerConfig
from motet.services.worker.service import WorkerService
from motet.shared.config import ConfigError
from motet.shared.profile import Profile, read_profile
from tests.engines.support_mesh import said, vllm_stack, workers

pytestmark = pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm")
SETUP = {"MOTET_MAX_LORA_RANK": "16", "MOTET_KV_MEMORY_GIB": "0.06", "MOTET_MAX_MODEL_LEN": "512"}
PATIENCE_S = 420


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile") / "vllm.json"
    words = [sys.executable, "-m", "motet", "profile", "--engine", "vllm", "--model", str(DEMO / "model"), "--out", str(out)]
    words += ["--seconds", "1", "--max-running", "4", "--max-loras", "8"]
    result = subprocess.run(words, env=os.environ | SETUP, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.fixture(scope="module")
def profile(written: Path) -> Profile:
    return read_profile(written)


def test_the_profile_names_the_engine_and_says_what_its_steps_take(profile: Profile) -> None:
    assert (profile.limits.engine, profile.limits.max_running) == ("vllm", 4)
    assert profile.fit is not None and profile.fit.steps > 100
    assert profile.perf.decode_base_ms + profile.perf.decode_row_ms > 0
    assert profile.perf.prefill_base_ms + profile.perf.prefill_token_ms + profile.perf.prefill_lora_ms > 0
    assert profile.perf.load_base_ms + profile.perf.load_ms_per_mib > 0
    assert 0 < profile.hops.assign_ms < 1000 and 0 < profile.hops.frame_ms < 1000


def test_the_profile_has_no_finer_model_because_vllm_does_not_report_what_that_is_fitted_to(profile: Profile) -> None:
    assert profile.engine_steps is None and profile.link is None


def test_only_workers_with_vllm_take_the_profile(written: Path, profile: Profile) -> None:
    model = str(DEMO / "model")
    again = WorkerService(WorkerConfig.of(model=model, engine="vllm", profile=str(written)))
    assert again._times.model == profile.perf  # private: it says so on the bus only while it runs
    with pytest.raises(ConfigError, match=r"--profile: vllm.json was measured with --engine vllm"):
        WorkerService(WorkerConfig.of(model=model, profile=str(written)))


def test_a_vllm_worker_started_from_the_profile_answers(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_PROFILE", str(written))

    async def ask(url: str) -> None:
        async with Client(url, timeout_s=300.0) as client:
            [worker] = await workers(client)
            assert worker["engine"] == "vllm"
            assert await said(client)

    with vllm_stack(tmp_path, DEMO / "model", "") as stack:
        asyncio.run(ask(stack.facts().urls[0]))
