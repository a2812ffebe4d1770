"""The arithmetic of `bench engine --bits` and the files that it makes for llama.cpp; no measurement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench import engine_bits, llama_files, models
from bench.engine_parent import Lap
from bench.roofline import Limits

TINY = models.Shape(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, vocabulary=64)


def test_decoding_is_a_lap_without_what_its_first_tokens_took() -> None:
    lap = engine_bits.timed(Lap(2.0, [[1] * 5, [2] * 5]), first_s=0.4)
    assert lap.whole == pytest.approx(5.0)
    assert lap.decode == pytest.approx(8 / 1.6)


def test_figures_are_ratios_of_median_rates() -> None:
    def rates(*each: float) -> dict[tuple[str, int], list[engine_bits.Timed]]:
        names = ("motet none", "motet int8", "motet int4", "llama bf16", "llama q8_0", "llama q4_0")
        pairs = zip(names, each, strict=False)
        return {(name, batch): [engine_bits.Timed(rate * batch, rate * batch)] for name, rate in pairs for batch in (1, 8, 32)}

    weights = engine_bits.decode_bandwidth(TINY, "motet none", 1.0)
    limits = Limits(bytes_per_s=weights * 40, flops_per_s=1.0)
    found = engine_bits.figures(rates(30, 60, 90, 20, 25, 45), TINY, limits)
    assert (found["int8_b1_vs_bf16"], found["b1_vs_llama_bf16"], found["b1_int4_vs_llama_q4"]) == (2.0, 1.5, 2.0)
    assert found["b1_bandwidth_fraction"] == 0.75
    alone = engine_bits.figures(rates(30, 60, 90), TINY, limits)
    assert not [name for name in alone if "llama" in name]


def test_int4_reads_little_more_than_half_a_byte_of_each_weight() -> None:
    bf16, int8, int4 = (engine_bits.decode_bandwidth(TINY, f"motet {width}", 1.0) for width in ("none", "int8", "int4"))
    assert bf16 == 2 * int8
    assert 9 / 16 < int4 / int8 < 0.7  # the matrix to the vocabulary has 8 bits


def test_llamas_files_rotate_neighbours_where_the_checkpoint_rotates_halves() -> None:
    heads, head_dim = 2, 6
    weight = np.arange(heads * head_dim)[:, None]
    found = llama_files._interleaved(weight, heads)[:, 0].reshape(heads, head_dim)
    assert found.tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]


def test_llama_has_one_adapter_for_all_requests_and_motet_one_for_each_as_well() -> None:
    assert engine_bits._chosen("llama q8_0", 8) == [("one", [engine_bits.POPULAR] * 8)]
    assert engine_bits._chosen("motet int4", 8) == [("one", [engine_bits.POPULAR] * 8), ("each", list(range(8)))]
    assert [kind for kind, _ in engine_bits._chosen("motet int4", 1)] == ["one"]


def test_every_tensor_of_a_checkpoint_has_a_name_in_llamas_files(tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", TINY, dtype="bfloat16")
    tensors = dict(llama_files._tensors(tmp_path / "model" / "model.safetensors"))
    names = {llama_files._name(name) for name in tensors}
    assert {"token_embd.weight", "output.weight", "blk.1.ffn_down.weight", "blk.0.attn_norm.weight"} <= names
    assert len(names) == len(tensors) == 3 + 2 * 9
    models.write_adapter(tmp_path / "adapter", TINY, rank=4, modules=models.ATTENTION, seed=1)
    stems = {name.split(".lora_")[0] for name in dict(llama_files._tensors(tmp_path / "adapter" / "adapter_model.safetensors"))}
    assert {llama_files._name(stem.removeprefix("base_model.model.")) for stem in stems} < names
    as_float = (tensors["model.norm.weight"].astype(np.uint32) << 16).view(np.float32)
    assert torch.equal(torch.from_numpy(as_float), torch.ones(TINY.hidden))
