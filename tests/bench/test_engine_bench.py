"""The files of the engine bench, and its figures over HTTP; no measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import engine_serve, models
from bench.rig.laps import Lap, Laps
from motet.services.registry.peft import convert
from motet.services.worker.engines.model_config import read_model_config
from motet.shared.base_shapes import read_shapes

TINY = models.Shape(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, vocabulary=64)


def test_every_rank_also_adapts_the_mlp_somewhere() -> None:
    whole = [i for i in range(models.ADAPTERS) if "down_proj" in models.adapter_modules(i)]
    assert {models.RANKS[i % len(models.RANKS)] for i in whole} == set(models.RANKS)
    assert len(whole) == 8


def test_serve_figures_compare_only_servers_that_were_measured() -> None:
    def side(scale: float) -> engine_serve.Side:
        laps = {n: Laps([Lap([0.1 * scale], [0.5], 3, [0.02 * scale, 0.02 * scale])]) for n in (1, 8, 32)}
        return engine_serve.Side([4.0], [5.0], laps, (int(100 * scale), int(200 * scale)))

    alone = engine_serve.figures({"motet": side(1)})
    assert (alone["itl_p50_ms_c1"], alone["itl_p50_ms_c8"], alone["itl_p50_ms_c32"]) == (20, 20, 20)
    assert alone["first_token_s"] == 4.0
    assert not [name for name in alone if "vllm" in name]
    both = engine_serve.figures({"motet": side(1), "vllm": side(4)})
    assert (both["ttft_c32_vs_vllm"], both["rss_vs_vllm"]) == (0.25, 0.25)


def test_the_files_are_ones_that_worker_and_registry_take(tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", TINY, dtype="bfloat16")
    models.write_adapter(tmp_path / "lora", TINY, rank=8, modules=models.adapter_modules(12), seed=1)
    config = read_model_config(tmp_path / "model")
    assert (config.hidden_size, config.num_layers, config.dtype) == (32, 2, "bfloat16")
    weights = tmp_path / "lora" / "adapter_model.safetensors"
    with weights.open("rb") as file:
        converted = convert(
            (tmp_path / "lora" / "adapter_config.json").read_bytes(),
            file,
            weights.stat().st_size,
            read_shapes(tmp_path / "model"),
            max_rank=64,
            max_bytes=1 << 20,
        )
    assert (converted.rank, converted.layers, len(converted.modules)) == (8, 2, 7)


def test_files_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    model, adapters = models.model_and_adapters("tiny")
    made = (model / "model.safetensors").stat().st_mtime_ns
    assert models.model_and_adapters("tiny") == (model, adapters)
    assert (model / "model.safetensors").stat().st_mtime_ns == made
    ranks = [json.loads((path / "adapter_config.json").read_text())["r"] for path in adapters]
    assert ranks == [8, 16, 32, 64] * 8
