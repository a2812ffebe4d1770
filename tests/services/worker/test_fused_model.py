"""The whole model with the operations that a GPU fuses, interpreted, beside the same model in plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from motet.kernels.triton import pointwise
from motet.kernels.triton.lora import INTERPRETED
from tests.support_models import FAMILIES, Sequence, drive, make_adapters, make_checkpoint, make_runner, random_prompts

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tensors here are the CPU's")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same_with_fused_operations(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_checkpoint(family, tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[2:4]
    fused, plain = (make_runner(model_dir, adapters, kernels="reference") for _ in range(2))
    monkeypatch.setattr(fused.steps.model, "pointwise", pointwise)
    prompts = random_prompts(3, seed=1, shortest=7, longest=7)
    ours, theirs = ([Sequence(prompt, i - 1, 2) for i, prompt in enumerate(prompts)] for _ in range(2))
    drive(fused, ours, chunk=5)
    drive(plain, theirs, chunk=5)
    for one, other in zip(ours, theirs, strict=True):
        assert one.output == other.output
        torch.testing.assert_close(torch.stack(one.logits), torch.stack(other.logits), rtol=1e-4, atol=1e-4)


def test_a_16_bit_model_loses_no_more_than_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16: the interpreter cuts bfloat16 off where a GPU rounds it."""
    model_dir = make_checkpoint("qwen3", tmp_path)
    fused, plain, exact = (make_runner(model_dir, [], dtype=f"float{n}", kernels="reference") for n in (16, 16, 32))
    monkeypatch.setattr(fused.steps.model, "pointwise", pointwise)
    prompt = random_prompts(1, seed=2, shortest=30)[0]
    logits = []
    for runner in (fused, plain, exact):
        sequence = Sequence(prompt, -1, 1)
        drive(runner, [sequence], chunk=1000)
        logits.append(torch.stack(sequence.logits))
    assert (logits[0] - logits[2]).norm() < 1.1 * (logits[1] - logits[2]).norm()
