"""A graph for steps with prompts replays a step padded into fixed buffers. The capture itself needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import motet.kernels.lora
import motet.kernels.triton
from motet.kernels.triton import pointwise
from motet.kernels.triton.attention import PagedAttention
from motet.kernels.triton.lora import INTERPRETED
from motet.services.worker.native import prompt_graphs
from motet.services.worker.native.decode_graphs import LEAST_COLUMNS, NEXT_COLUMNS
from motet.services.worker.native.prompt_graphs import (
    MOST,
    ROWS,
    Bucket,
    PromptBuffers,
    PromptGraphs,
    bucket_for,
)
from motet.services.worker.native.runner import ModelRunner
from motet.services.worker.native.step_batch import StepBatch
from tests.services.worker.support_graphs import repeated
from tests.services.worker.test_decode_graphs import give_history
from tests.support_models import VOCAB, Sequence, make_adapters, make_checkpoint, make_runner, step_batch

BLOCK = 8
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="tensors here are the CPU's")


def mixed_step(parts: list[tuple[int, int, int]], seed: int = 0) -> StepBatch:
    """The last rows of sequences: of each its tokens in all, how many of them are rows, and its slot. Logits of all rows."""
    draw = np.random.default_rng(seed)
    blocks = draw.permutation(512).reshape(-1, 16).tolist()
    sequences = [
        Sequence(draw.integers(0, VOCAB, length).tolist(), slot, 1, done=length - take, blocks=mine)
        for (length, take, slot), mine in zip(parts, blocks, strict=False)
    ]
    return step_batch(sequences, [take for _, take, _ in parts], BLOCK)


STEPS = [
    mixed_step([(40, 1, 0), (9, 9, 1), (7, 1, -1), (90, 14, 2)], seed=1),
    mixed_step([(32, 32, 0)], seed=2),
    mixed_step([(3, 1, 1), (1, 1, -1), (128, 10, -1), (5, 5, 2), (6, 6, 2)], seed=3),
]


def give_history_alone(step: StepBatch, runner: ModelRunner) -> None:
    """Write the keys and values of `give_history` that precede the step's rows. All other memory of the cache is NaN."""
    give_history(runner)
    data = runner.memory.cache.data
    history = data.clone()
    data.fill_(float("nan"))
    for table, context, rows in zip(step.block_tables, step.context_lens, np.diff(step.seq_starts), strict=True):
        for at in range(context - rows):
            data[:, table[at // BLOCK], at % BLOCK] = history[:, table[at // BLOCK], at % BLOCK]


@pytest.fixture
def nan_for_nothing() -> Iterator[None]:
    """Memory that nothing was written to is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def with_triton(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on all kernels are Triton's."""
    monkeypatch.setattr(motet.kernels.lora, "kernels_of", lambda pool: motet.kernels.triton)
    monkeypatch.setattr(runner.steps.model, "pointwise", pointwise)
    runner.memory.cache.library = PagedAttention(runner.memory.cache, heads=runner.config.num_heads)


def test_a_bucket_has_room_and_not_much_more() -> None:
    for rows in range(1, ROWS[-1] + 1):
        for blocks in (1, 64, 65, 1000):
            bucket = bucket_for(rows, blocks, "decode")
            assert bucket is not None and bucket.plan == "decode"
            assert rows <= bucket.rows <= max(2 * rows, ROWS[0]) and bucket.rows in ROWS
            assert blocks <= bucket.columns <= max(NEXT_COLUMNS * blocks, LEAST_COLUMNS)
    assert bucket_for(ROWS[-1] + 1, 1, None) is None


@interpreted
@pytest.mark.usefixtures("nan_for_nothing")
@pytest.mark.parametrize(("family", "plan"), [("llama3", "decode"), ("mistral", "prefill"), ("qwen3", "prefill")])
def test_the_same_buffers_serve_one_step_after_another(
    family: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_checkpoint(family, tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:3]
    runner, twin = (make_runner(model_dir, adapters, kernels="reference") for _ in range(2))
    want = []
    for step in STEPS:
        give_history(twin)
        want.append(twin.forward(step))
    with_triton(runner, monkeypatch)
    cache = runner.memory.cache
    with torch.inference_mode():
        buffers = PromptBuffers(Bucket(32, 16, plan), runner.steps.model, cache, runner.pool, cache.null_block - 1)
        for step, logits in zip(STEPS, want, strict=True):
            give_history_alone(step, runner)
            buffers.fill(step)
            got = runner.steps.model.logits(buffers.run(), torch.from_numpy(step.logit_rows))
            torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)


def graphs_of(runner: ModelRunner) -> PromptGraphs:
    cache = runner.memory.cache
    graphs: Any = PromptGraphs(runner.steps.model, cache, runner.pool, scratch_block=cache.null_block - 1, memory=None)
    graphs.capture = repeated
    return graphs


@interpreted
def test_a_step_is_replayed_once_there_have_been_others_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_checkpoint("qwen2", tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:3]
    runner, twin = (make_runner(model_dir, adapters, kernels="reference") for _ in range(2))
    with_triton(runner, monkeypatch)
    graphs = runner.steps.prompts = graphs_of(runner)
    graphs.after = 1
    monkeypatch.setattr(prompt_graphs, "ROWS", (8, 16))
    monkeypatch.setattr(prompt_graphs, "lora_plan", lambda pool, row_slot: "prefill" if len(row_slot) > 8 else "decode")
    first, second = mixed_step([(5, 5, 1), (30, 1, 0)]), mixed_step([(17, 1, 2), (5, 4, -1), (9, 3, 0)], seed=1)
    plain, long = mixed_step([(6, 6, -1), (30, 1, -1)]), mixed_step([(11, 11, 2)])
    for step in (first, plain, first, second, plain, long, long):
        step.logit_rows = np.array([3, 1])
        give_history_alone(step, runner)
        give_history(twin)
        torch.testing.assert_close(runner.forward(step), twin.forward(step), rtol=1e-4, atol=1e-4)
    assert list(graphs.captured) == [Bucket(8, 64, "decode"), Bucket(8, 64, None), Bucket(16, 64, "prefill")]


@interpreted
def test_graphs_are_captured_at_the_start_without_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_checkpoint("llama3", tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:3]
    runner, twin = (make_runner(model_dir, adapters, kernels="reference") for _ in range(2))
    with_triton(runner, monkeypatch)
    graphs = runner.steps.prompts = graphs_of(runner)
    monkeypatch.setattr(prompt_graphs, "ROWS", (8, 16))
    give_history(runner, twin)
    before, scratch_block = runner.memory.cache.data.clone(), runner.memory.cache.null_block - 1
    runner.prepare()
    before[:, scratch_block] = runner.memory.cache.data[:, scratch_block]
    assert torch.equal(runner.memory.cache.data, before) and runner.launch_s > 0
    assert {(bucket.rows, bucket.plan) for bucket in graphs.captured} == {
        (rows, plan) for rows in (8, 16) for plan in (None, "decode", "prefill")
    }
    step = mixed_step([(5, 5, 1), (30, 1, 0)])
    torch.testing.assert_close(runner.forward(step), twin.forward(step), rtol=1e-4, atol=1e-4)


def test_steps_that_no_graph_serves_are_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(make_checkpoint("llama3", tmp_path), [], kernels="reference")
    graphs = graphs_of(runner)
    graphs.after = 0
    step = mixed_step([(9, 9, -1)])
    assert graphs.forward(step) is None, "without a library"
    runner.memory.cache.library = PagedAttention(runner.memory.cache, heads=runner.config.num_heads)
    step.merged = True
    assert graphs.forward(step) is None
    step.merged = False
    monkeypatch.setattr(runner.memory.cache.library, "graphs_prompts", False, raising=False)
    assert graphs.forward(step) is None
    monkeypatch.undo()
    graphs.captured = {Bucket(number, 64, None): None for number in range(MOST)}  # type: ignore[misc]
    assert graphs.forward(step) is None, "there are enough of them"
    assert graphs.forward(mixed_step([(120, 120, -1)] * 5)) is None, "too many rows"


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_here_says_what_the_reference_says(device: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama3", tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:3]
    runner, twin = make_runner(model_dir, adapters, device=device), make_runner(model_dir, adapters, kernels="reference")
    for step in [*STEPS, mixed_step([(70, 70, 2), (9, 1, 1)])] * 4:  # on a GPU the later ones are replayed
        give_history(runner, twin)
        torch.testing.assert_close(runner.forward(step).cpu(), twin.forward(step), rtol=1e-3, atol=1e-3)
    if device == "cuda":
        assert {bucket.plan for bucket in runner.steps.prompts.captured} == {"decode", "prefill"}
