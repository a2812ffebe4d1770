"""The arithmetic of `bench engine`, its table, its plot, and the files that it makes for llama.cpp; no measurement."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import engine, engine_plot, llama_files, models, roofline
from bench.engine_parent import Lap, contestant
from bench.engine_table import LABELS, Measured, Turn, decode_bandwidth, figures, show, timed
from bench.roofline import Limits

TINY = models.Shape(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, vocabulary=64)
ALL = [name for group in engine.groups(engine.PEERS) for name in group]


def measured(rates: dict[str, float], *, first: int = 7) -> Measured:
    """Every cell of these contestants. Each request has this rate in tokens/s; adapters halve it, decoding alone doubles it."""
    found = Measured()
    for name, rate in rates.items():
        for turn in engine.TURNS:
            if engine.chosen(name, turn) is None:
                continue
            seconds = 10 / rate * (1 if turn.kind == "none" else 2)
            lap, alone = Lap(seconds, [[first] * 10] * turn.batch), Lap(seconds * 0.55, [[first]] * turn.batch)
            found.add(name, turn, timed(lap, alone if turn.kind == "none" else None))
    return found


def made(rates: dict[str, float]) -> dict[str, Any]:
    weights = decode_bandwidth(TINY, "motet none", 1.0)
    return figures(measured(rates), TINY, Limits(weights * 80, 1e9), 4, 10, engine.chosen)


CHILD = """
from bench.engine_child import serve

def make(setup):
    print("a library's noise")
    if setup["fails"]:
        raise SystemExit("no such file")
    return lambda prompts, adapters, tokens: [[adapter] * tokens for adapter in adapters]

serve(make)
"""


def test_a_contestant_answers_laps_and_says_why_it_cannot() -> None:
    argv = [sys.executable, "-c", CHILD]
    with contestant("child", argv, {"fails": False}, os.environ) as child:
        lap = child.lap([[1, 2], [3]], [4, -1], 2)
        assert lap.outputs == [[4, 4], [-1, -1]] and lap.seconds > 0
    assert child.process.ended
    with pytest.raises(RuntimeError, match="no such file"), contestant("child", argv, {"fails": True}, os.environ):
        pass


def test_a_turn_asks_for_no_adapter_one_for_all_or_one_each() -> None:
    assert [engine.chosen("motet int4", Turn(kind, 8)) for kind in ("none", "one", "each")] == [
        [-1] * 8,
        [engine.POPULAR] * 8,
        list(range(8)),
    ]


def test_a_batch_of_llama_has_one_adapter_at_most() -> None:
    assert engine.chosen("llama q8_0", Turn("one", 8)) == [engine.POPULAR] * 8
    assert engine.chosen("llama q8_0", Turn("each", 8)) is None


def test_every_batch_size_is_measured_with_and_without_adapters() -> None:
    assert {turn.batch for turn in engine.TURNS if turn.kind == "none"} == {1, 8, 32}
    assert {turn.batch for turn in engine.TURNS if turn.kind == "one"} == {1, 8, 32}
    assert {turn.batch for turn in engine.TURNS if turn.kind == "each"} == {8, 32}  # of one request it is the same as "one"


def test_each_peer_runs_beside_motet_and_all_of_them_have_a_name_in_the_table() -> None:
    assert set(ALL) == set(LABELS)
    assert all(any(name.startswith("motet") for name in group) for group in engine.groups(engine.PEERS))
    assert engine.groups(()) == [["motet none", "motet int8", "motet int4"]]
    assert engine.groups(("vllm",))[1] == ["motet again", "vllm bf16"]


def test_decoding_is_a_lap_without_what_its_first_tokens_took() -> None:
    lap = timed(Lap(2.0, [[1] * 5, [2] * 5]), Lap(0.4, [[1], [2]]))
    assert lap.whole == pytest.approx(5.0)
    assert lap.decode == pytest.approx(8 / 1.6)
    assert lap.first == (1, 2)


def test_figures_are_ratios_of_rates() -> None:
    motet = {"motet none": 30.0, "motet int8": 60.0, "motet int4": 90.0, "motet again": 32.0}
    found = made(motet | {"llama bf16": 20.0, "llama q8_0": 25.0, "llama q4_0": 45.0, "vllm bf16": 16.0, "peft bf16": 8.0})
    assert (found["int8_b1_vs_bf16"], found["b1_vs_llama_bf16"], found["b1_int4_vs_llama_q4"]) == (2.0, 1.5, 2.0)
    assert (found["base_vs_vllm"], found["lora32_vs_vllm"], found["lora32_vs_peft"]) == (2.0, 2.0, 4.0)
    assert found["lora32_vs_own_base"] == 0.5 and 0 < found["lora32_bound"] < 1
    assert found["b1_bandwidth_fraction"] == pytest.approx(0.75)
    alone = made({"motet none": 30.0, "motet int8": 60.0, "motet int4": 90.0})
    assert not [name for name in alone if "llama" in name or "vllm" in name or "peft" in name]


def test_the_median_of_the_rounds_counts() -> None:
    laps = Measured()
    for rate in (10, 11, 90):
        laps.add("motet none", Turn("none", 1), timed(Lap(10 / rate, [[7] * 10])))
    assert laps.rate("motet none", Turn("none", 1)) == pytest.approx(11)


def test_a_figure_compares_laps_of_the_same_round() -> None:
    laps, turn = Measured(), Turn("none", 1)
    for ours, theirs in ((10, 5), (30, 20), (40, 10)):  # the machine's speed changes from round to round
        laps.add("motet int8", turn, timed(Lap(1 / ours, [[7]])))
        laps.add("motet none", turn, timed(Lap(1 / theirs, [[7]])))
    assert laps.ratio(("motet int8", turn), ("motet none", turn)) == pytest.approx(2.0)
    assert laps.ratio(("motet int8", turn), ("llama bf16", turn)) is None


def test_a_lap_is_compared_with_the_limits_of_its_own_time() -> None:
    limits, turn = Limits(1e9, 1e12), Turn("none", 1)
    alone = decode_bandwidth(TINY, "motet none", 1.0)
    measured = Measured()
    for steps, bandwidth in ((10, 20 * alone), (20, 25 * alone), (30, 50 * alone)):
        measured.add("motet none", turn, timed(Lap(2 + 8 / steps, [[7] * 9]), Lap(2, [[7]]), Limits(bandwidth, 1e12)))
        measured.add("motet none", Turn("none", 32), timed(Lap(1 / steps, [[7] * 9] * 32), None, Limits(1e15, 1e9 * steps)))
    found = figures(measured, TINY, limits, 64, 9, engine.chosen)
    assert found["b1_bandwidth_fraction"] == pytest.approx(0.6)
    as_fast = roofline.share(Limits(1e15, 1e9), TINY, [-1] * 32, 64, 9, 1.0, weight_bytes=2)
    assert found["b32_limit_fraction"] == pytest.approx(as_fast.limit, rel=1e-2)


def test_agreement_counts_requests_with_the_same_first_token() -> None:
    laps = Measured()
    laps.add("motet none", Turn("none", 2), timed(Lap(1, [[1, 2], [3, 4]])))
    laps.add("llama bf16", Turn("none", 2), timed(Lap(1, [[1, 9], [5, 4]])))
    assert laps.agreement("motet none", "llama bf16") == 0.5


def test_one_table_has_every_contestant_with_its_share_of_the_limit() -> None:
    found = made(dict.fromkeys(ALL, 10.0))
    table = show("M", found)
    for name in ALL:
        rows = [line for line in table.splitlines() if line.startswith(LABELS[name] + "  ")]
        assert len(rows) == 3, "without adapters, with one for all, with one each"
        assert rows[2].rstrip().endswith("cannot") if name.startswith("llama") else rows[0].count("%") == 3


def test_the_plot_draws_every_contestant_of_the_last_record_of_m(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peers = {"model": "M"} | made(dict.fromkeys(ALL, 10.0))
    alone = {"model": "M"} | made({"motet none": 30.0})
    lines = [json.dumps(record) for record in ({"model": "M", "serve": True}, peers, alone, {**peers, "model": "S"})]
    engine_plot.draw(engine_plot.last(lines), tmp_path / "speed.svg")
    drawn = (tmp_path / "speed.svg").read_text()
    assert all(LABELS[name] in drawn for name in ALL if name != engine_plot.UNSEEN)
    with pytest.raises(ValueError, match="no record"):
        engine_plot.last(lines[2:])


def test_int4_reads_little_more_than_half_a_byte_of_each_weight() -> None:
    bf16, int8, int4 = (decode_bandwidth(TINY, f"motet {width}", 1.0) for width in ("none", "int8", "int4"))
    assert bf16 == 2 * int8
    assert 9 / 16 < int4 / int8 < 0.7  # the matrix to the vocabulary has 8 bits


def test_llamas_files_rotate_neighbours_where_the_checkpoint_rotates_halves() -> None:
    heads, head_dim = 2, 6
    weight = np.arange(heads * head_dim)[:, None]
    found = llama_files.interleaved(weight, heads)[:, 0].reshape(heads, head_dim)
    assert found.tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]


def test_every_tensor_of_a_checkpoint_has_a_name_in_llamas_files(tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", TINY, dtype="bfloat16")
    tensors = dict(llama_files.tensors_of(tmp_path / "model" / "model.safetensors"))
    names = {llama_files.llama_name(name) for name in tensors}
    assert {"token_embd.weight", "output.weight", "blk.1.ffn_down.weight", "blk.0.attn_norm.weight"} <= names
    assert len(names) == len(tensors) == 3 + 2 * 9
    models.write_adapter(tmp_path / "adapter", TINY, rank=4, modules=models.ATTENTION, seed=1)
    stems = {
        name.split(".lora_")[0] for name in dict(llama_files.tensors_of(tmp_path / "adapter" / "adapter_model.safetensors"))
    }
    assert {llama_files.llama_name(stem.removeprefix("base_model.model.")) for stem in stems} < names
    as_float = (tensors["model.norm.weight"].astype(np.uint32) << 16).view(np.float32)
    assert torch.equal(torch.from_numpy(as_float), torch.ones(TINY.hidden))
