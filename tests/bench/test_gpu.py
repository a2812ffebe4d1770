"""`python -m bench gpu`: every stage runs dry; a point that crashes or hangs costs no other point's result."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu_stages import peer_files
from bench.gpu_stages.figures import STAGES
from bench.gpu_stages.results import Point, Results
from bench.gpu_stages.supervisor import supervise

ROOT = Path(__file__).parents[2]
CHILD = """
import os, time
from bench.gpu_stages.results import Point
from bench.gpu_stages.supervisor import serve

def fails():
    raise ValueError("no such kernel")

healthy = [{healthy}]
points = [
    Point("one", lambda: print("noise") or {{"figure": 1.5}}),
    Point("fails", fails),
    Point("crashes", lambda: os._exit(9)),
    Point("hangs", lambda: time.sleep(600), 1.0),
    Point("rests", lambda: time.sleep({rest}) or {{}}),
    Point("last", lambda: {{"figure": 2}}),
]
serve(lambda: points, healthy=healthy.pop)
"""


@pytest.mark.parametrize("stage", sorted(gpu.STAGES))
def test_every_stage_runs_dry(stage: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOTET_KERNELS", "reference")  # as the run itself sets it: undone afterwards
    assert gpu.dry_run([stage]) == {"stages": 1, "stages_failed": 0}, capsys.readouterr().err


def child(*, rest: float = 0.0, healthy: bool = True) -> list[str]:
    return [sys.executable, "-c", CHILD.format(rest=rest, healthy=healthy)]


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def lines(path: Path) -> dict[str, dict[str, object]]:
    found = [json.loads(line) for line in (path / "stage-3.jsonl").read_text().splitlines()]
    assert all("run" in line or "point" in line for line in found)
    return {line["point"]: line for line in found if "point" in line}


@pytest.mark.parametrize("healthy", [True, False])
def test_a_point_that_fails_crashes_or_hangs_leaves_its_reason_and_the_next_one_runs(tmp_path: Path, healthy: bool) -> None:
    results = Results(tmp_path, 3)
    left = supervise(child(healthy=healthy), results, budget_s=60, log=tmp_path / "log")
    assert left == []
    assert results.done == {"one", "rests", "last"} and set(results.failed) == {"fails", "crashes", "hangs"}
    found = lines(tmp_path)
    assert list(found) == ["one", "fails", "crashes", "hangs", "rests", "last"]
    assert found["one"]["figure"] == 1.5
    assert "no such kernel" in str(found["fails"]["error"])
    assert "status 9" in str(found["crashes"]["error"])
    assert "no end within 1 s" in str(found["hangs"]["error"])
    log = (tmp_path / "log").read_text()
    assert "noise" in log and "Timeout" in log, "what children print, and the stack of what hangs"


def test_a_later_run_continues_where_the_last_one_ended_and_repeats_failed_points(tmp_path: Path) -> None:
    earlier = Results(tmp_path, 3)
    for line in ({"point": "one", "figure": 7}, {"point": "rests"}, {"point": "fails", "error": "Traceback"}):
        earlier.add(line)
    with (tmp_path / "stage-3.jsonl").open("a") as file:
        file.write('{"point": "last", "fig')  # cut off in the middle
    (tmp_path / "more").mkdir()
    results = Results(tmp_path / "more", 3, have=tmp_path)
    assert results.done == {"one", "rests"}
    supervise(child(), results, budget_s=60, log=tmp_path / "log")
    assert set(lines(tmp_path / "more")) == {"fails", "crashes", "hangs", "last"}
    assert next(line for line in results.lines if line["point"] == "one")["figure"] == 7


def test_the_bench_stops_when_its_time_is_over_and_says_what_is_left(tmp_path: Path) -> None:
    results = Results(tmp_path, 3)
    for name in ("fails", "crashes", "hangs"):
        results.add({"point": name})
    left = supervise(child(rest=3.0), results, budget_s=5.0, log=tmp_path / "log")
    assert left[-1] == "last" and results.done.isdisjoint(left)


def test_children_that_never_start_are_not_tried_for_ever(tmp_path: Path) -> None:
    results = Results(tmp_path, 3)
    supervise([sys.executable, "-c", "raise SystemExit(5)"], results, budget_s=60, log=tmp_path / "log")
    assert "status 5" in results.failed["start"]


def test_a_failing_point_is_a_line_with_its_traceback(tmp_path: Path) -> None:
    results = Results(tmp_path, 3)
    results.measure(Point("broken", lambda: {"figure": 1 / 0}))
    assert "ZeroDivisionError" in results.failed["broken"] and not results.lines


def test_figures_are_read_off_the_lines_of_a_stage() -> None:
    decode = [
        {"point": "a", "rows": 8, "adapters": 8, "ranks": "mixed", "floor": 3.0, "beside": 4.0, "after": 6.0},
        {"point": "b", "rows": 32, "adapters": 32, "ranks": "mixed", "floor": 9.0, "apart": 10.0},
    ]
    assert STAGES[3].figures(decode) == {"fraction_of_floor_8": 0.75, "fraction_of_floor_32": 0.9}
    serving = [
        {"point": f"{r}-{a}", "model": m, "requests": r, "adapters": a, "tokens_per_s": t, "decode_ms": 8.0, "roofline_ms": 6.0}
        for m, r, a, t in (
            ("7B", 32, 0, 1.0),
            ("8B", 32, 0, 1000.0),
            ("8B", 32, 32, 930.0),
            ("8B", 256, 0, 4000.0),
            ("8B", 256, 256, 3600.0),
        )
    ]
    assert STAGES[4].figures(serving) == {"keeps_32": 0.93, "keeps_256": 0.9, "roofline_fraction": 0.75}
    burst = {
        "point": "burst beside decoding",
        "auto": {"ttft_ms": 22.0, "gap_p99_ms": 9.0},
        "cached": {"ttft_ms": 20.0, "gap_p99_ms": 6.0},
    }
    assert STAGES[5].figures([burst]) == {"ttft_vs_cached": 1.1, "others_stall": 1.5}
    assert STAGES[2].figures([{"point": "a", "good": True, "worst_error": 1e-3}, {"point": "b", "good": False}]) == {
        "checks": 2,
        "wrong": 1,
        "worst_error": 1e-3,
    }
    peers = [
        {
            "rows": 32,
            "adapters": 32,
            "ranks": "mixed",
            "apart": 6.0,
            "after": 7.0,
            "vllm": 12.0,
            "vllm_dual": 10.0,
            "sglang": 8.0,
        },
        {"rows": 256, "adapters": 1, "ranks": "64", "after": 5.0, "vllm": 4.0},
    ]
    assert STAGES[8].figures(peers) == {
        "worst_vs_vllm": 1.25,
        "vs_vllm_32_mixed": 0.6,
        "vs_vllm_256_1_64": 1.25,
        "worst_vs_sglang": 0.75,
        "vs_sglang_32_mixed": 0.75,
    }
    for stage in STAGES.values():
        assert set(stage.figures([])), "a stage without a line has figures, of nothing"


def test_without_the_files_of_others_a_dry_run_of_their_stage_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOTET_PEERS", str(tmp_path))
    monkeypatch.setenv("MOTET_KERNELS", "reference")
    assert gpu.dry_run([8]) == {"stages": 1, "stages_failed": 0}
    assert f"{tmp_path} is missing (`make gpu-peers`)" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="make gpu-peers"):
        peer_files.vllm()


def test_files_of_others_are_loaded_with_stubs_and_leave_no_module_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_PEERS", str(tmp_path))
    ops = tmp_path / "vllm/lora/ops/triton_ops"
    ops.mkdir(parents=True)
    texts = {
        "utils": "from vllm import envs\nfrom vllm.utils.math_utils import next_power_of_2\nwide = next_power_of_2(33)\n",
        "lora_shrink_op": "from vllm import envs\nfrom vllm.lora.ops.triton_ops.utils import wide\nlora_shrink = wide\n",
        "lora_expand_op": "lora_expand = 2\n",
        "lora_kernel_metadata": "LoRAKernelMeta = 3\n",
    }
    for name, text in texts.items():
        (ops / f"{name}.py").write_text(text)
    before = set(sys.modules)
    found = peer_files.vllm()
    assert (found.lora_shrink, found.lora_expand, found.LoRAKernelMeta) == (64, 2, 3)
    assert found.envs is found.utils.envs and found.envs.VLLM_LORA_ENABLE_DUAL_STREAM is False
    assert not {name for name in set(sys.modules) - before if name.startswith("vllm")}


def test_what_the_bundle_brings_is_locked_with_its_hashes() -> None:
    spec = importlib.util.spec_from_file_location("gpu_bundle", ROOT / ".ci/gpu_bundle.py")
    assert spec is not None and spec.loader is not None
    bundle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bundle)
    for name in bundle.LACKING:
        first, *hashes = bundle.locked(name).splitlines()
        assert first.startswith(f"{name}==") and hashes and all("--hash=sha256:" in one for one in hashes)
