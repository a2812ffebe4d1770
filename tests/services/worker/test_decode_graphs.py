"""A decode graph replays a step padded into fixed buffers. The capture itself needs a GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import motet.kernels.lora
import motet.kernels.reference
import motet.kernels.triton
from motet.kernels.triton.attention import PagedAttention
from motet.kernels.triton.lora import INTERPRETED
from motet.services.worker.native import decode_graphs
from motet.services.worker.native.decode_graphs import (
    LEAST_COLUMNS,
    LEAST_GATHERED,
    NEXT_COLUMNS,
    NEXT_GATHERED,
    ROWS,
    DecodeBuffers,
    bucket_for,
)
from motet.services.worker.native.runner import ModelRunner
from motet.services.worker.native.step_batch import StepBatch
from tests.services.worker.support_graphs import repeated_decodes
from tests.support_models import VOCAB, make_adapters, make_checkpoint, make_runner

BLOCK = 8
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize(
    ("most_gathered", "least", "factor"), [(1 << 30, LEAST_GATHERED, NEXT_GATHERED), (None, LEAST_COLUMNS, NEXT_COLUMNS)]
)
def test_a_bucket_has_room_and_not_much_more(most_gathered: int | None, least: int, factor: int) -> None:
    for rows in range(1, ROWS[-1] + 1):
        for blocks in (1, 15, 16, 17, 64, 65, 100, 1025):
            bucket = bucket_for(rows, blocks, most_gathered)
            assert bucket is not None
            assert rows <= bucket[0] <= max(2 * rows, 1) and bucket[0] in ROWS
            assert blocks <= bucket[1] <= max(factor * (blocks - 1), least)


def test_what_would_gather_too_much_has_no_bucket() -> None:
    assert bucket_for(4, 32, 128) == (4, 32)
    assert bucket_for(4, 33, 128) is None
    assert bucket_for(ROWS[-1] + 1, 1, 1 << 30) is None and bucket_for(ROWS[-1] + 1, 1, None) is None


def decode_step(lengths: list[int], slots: list[int], seed: int) -> StepBatch:
    """One row for sequences of these lengths. Each has its own blocks."""
    draw = np.random.default_rng(seed)
    contexts = np.array(lengths, dtype=np.int32)
    tables = np.arange(len(lengths) * 16, dtype=np.int32).reshape(len(lengths), 16)
    last = contexts.astype(np.int64) - 1
    return StepBatch(
        token_ids=draw.integers(0, VOCAB, len(lengths)),
        positions=last,
        row_slot=np.array(slots, dtype=np.int32),
        seq_starts=np.arange(len(lengths) + 1, dtype=np.int32),
        context_lens=contexts,
        block_tables=np.ascontiguousarray(tables[:, : -(-int(contexts.max()) // BLOCK)]),
        kv_slots=tables[np.arange(len(lengths)), last // BLOCK].astype(np.int64) * BLOCK + last % BLOCK,
        logit_rows=np.arange(len(lengths)),
    )


STEPS = [
    decode_step([5, 90, 1, 33, 17], [0, -1, 1, 1, 2], seed=0),
    decode_step([6, 91], [2, -1], seed=1),
    decode_step([7, 100, 128, 8, 9, 9, 64, 2], [0, 0, 0, 1, 2, 2, -1, -1], seed=2),
]


def give_history(*runners: ModelRunner) -> None:
    """Write the same keys and values to all caches."""
    for runner in runners:
        blocks = runner.memory.cache.data[:, :512]
        blocks.copy_(torch.randn(blocks.shape, generator=torch.Generator().manual_seed(1)))


def buffers_of(runner: ModelRunner, bucket: tuple[int, int], scratch_block: int) -> DecodeBuffers:
    return DecodeBuffers(bucket, runner.steps.model, runner.memory.cache, runner.pool, scratch_block)


def logits_of(buffers: DecodeBuffers) -> torch.Tensor:
    """Of every row of the bucket."""
    return buffers.run(torch.full((ROWS[-1], VOCAB), float("nan")))


@pytest.mark.parametrize(
    ("family", "on"),
    [
        ("llama3", motet.kernels.reference),
        ("mistral", motet.kernels.reference),
        pytest.param(
            "qwen2", motet.kernels.triton, marks=pytest.mark.skipif(not INTERPRETED, reason="tensors here are the CPU's")
        ),
    ],
)
def test_the_same_buffers_serve_one_step_after_another(
    family: str, on: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_checkpoint(family, tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:3]
    runner, twin = (make_runner(model_dir, adapters, kernels="reference") for _ in range(2))
    give_history(runner, twin)
    want = [twin.forward(step) for step in STEPS]
    monkeypatch.setattr(motet.kernels.lora, "kernels_of", lambda pool: on)
    with torch.inference_mode():
        buffers = buffers_of(runner, (8, 16), scratch_block=runner.memory.cache.null_block - 1)
        for step, logits in zip(STEPS, want, strict=True):
            buffers.fill(step)
            torch.testing.assert_close(logits_of(buffers)[: len(logits)], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="tensors here are the CPU's")
def test_no_step_of_a_short_context_waits_for_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_checkpoint("llama3", tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:3]
    runner, twin = (make_runner(model_dir, adapters, kernels="reference") for _ in range(2))
    cache = runner.memory.cache
    monkeypatch.setattr(motet.kernels.lora, "kernels_of", lambda pool: motet.kernels.triton)
    monkeypatch.setattr(decode_graphs, "ROWS", (2, 4, 8, 16))
    cache.library = PagedAttention(cache, heads=runner.config.num_heads)
    graphs = runner.steps.graphs = repeated_decodes(runner, cache.null_block - 1, most_rows=5)
    give_history(runner, twin)
    before = cache.data.clone()
    runner.prepare()
    before[:, cache.null_block - 1] = cache.data[:, cache.null_block - 1]
    assert torch.equal(cache.data, before), "only the scratch block may be written"
    prepared = set(graphs.captured)
    assert {(rows, adapted, merged) for (rows, _), adapted, merged in prepared} == {
        (rows, adapted, False) for rows in (2, 4, 8) for adapted in (False, True)
    }
    for step in (*STEPS, decode_step([6, 91, 3], [-1, -1, -1], seed=3)):
        torch.testing.assert_close(runner.forward(step), twin.forward(step), rtol=1e-4, atol=1e-4)
    assert set(graphs.captured) == prepared
    results = {logits.untyped_storage().data_ptr() for _, _, logits in graphs.captured.values()}
    assert len(results) == 1, "one buffer for the logits of all graphs"


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_here_says_what_the_reference_says(device: str, tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama3", tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:3]
    runner, twin = make_runner(model_dir, adapters, device=device), make_runner(model_dir, adapters, kernels="reference")
    for step in (*STEPS, *STEPS):  # on a GPU the second round replays what the first captured
        give_history(runner, twin)
        torch.testing.assert_close(runner.forward(step).cpu(), twin.forward(step), rtol=1e-3, atol=1e-3)
