"""Promise: a backend is one file and one line in a table; a backend that cannot run here is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.kernels.cpu import available_isas
from motet.services.worker.engines.request import EngineLimits
from motet.services.worker.native import backends
from motet.services.worker.native.backend import BackendOptions
from motet.services.worker.native.engine import Engine
from motet.shared.config import ConfigError
from motet.shared.worker_options import WorkerOptions
from tests.services.worker.support_engine import WholeRunner, request, run
from tests.support_models import make_checkpoint


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    model_dir = make_checkpoint("llama2", tmp_path_factory.mktemp("backends"))
    return {"model_dir": model_dir, "kv_blocks": 20, "lora_bytes": 1 << 20, "max_lora_rank": 8, "max_loras": 1, "threads": 1}


def test_a_backend_in_the_table_is_what_the_engine_runs_on(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def mine(given: BackendOptions) -> backends.Backend:
        asked.append(given.model_dir)
        return WholeRunner(**vars(backends.reference(given)))

    monkeypatch.setitem(backends.BACKENDS, "mine", mine)
    backend = backends.open_backend(BackendOptions(**options, kernels="mine"))
    limits = EngineLimits(max_running=2, block_size=16, kv_blocks=20)
    engine = Engine(backend, limits, WorkerOptions(max_step_tokens=64, max_loras=1))
    result = run(engine, [request("r", [1, 2, 3], max_tokens=4)])
    assert asked == [options["model_dir"]] and len(result.tokens["r"]) == 4


@pytest.mark.parametrize(
    ("kernels", "device", "reason"), [("cpu", "cuda", "cuda"), ("cuda", "cpu", "cpu"), ("fpga", "cpu", "one of auto, cpu")]
)
def test_a_backend_that_cannot_run_here_is_refused(options: dict[str, object], kernels: str, device: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"kernels '{kernels}'.*{reason}"):
        backends.open_backend(BackendOptions(**options, kernels=kernels, device=device))


def test_the_environment_names_a_backend_where_the_options_leave_it_open(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_KERNELS", "reference")
    chosen = backends.open_backend(BackendOptions(**options))
    assert type(chosen.steps).__name__ == "TorchSteps"
    asked = backends.open_backend(BackendOptions(**options, kernels="cpu"))
    assert type(asked.steps).__name__ == "CompiledSteps"
    asked.close()


def test_without_a_compiler_the_reference_computes_and_says_what_to_install(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shares: list[float] = []
    compiled = backends.open_backend(BackendOptions(**options, loaded=shares.append))
    assert compiled.kernels == available_isas()[-1] and compiled.kernels_note == ""
    compiled.close()
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 1 and len(shares) > 4
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MOTET_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("MOTET_CPU_ISA", raising=False)
    replaced = backends.open_backend(BackendOptions(**options))
    assert replaced.kernels == "reference"
    assert "apt install g++" in replaced.kernels_note and "\n" not in replaced.kernels_note
