"""The model side of the engine against transformers + peft in fp32, for every family: logits and greedy tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from motet.kernels.cpu import available_isas
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.native.runner import ModelRunner
from tests.support_models import (
    FAMILIES,
    AdapterFixture,
    Oracle,
    Sequence,
    drive,
    make_adapters,
    make_checkpoint,
    make_runner,
    random_prompts,
    step_batch,
)

TOLERANCE = 1e-4


@dataclass
class Family:
    model_dir: Path
    adapters: list[AdapterFixture]
    oracle: Oracle
    runner: ModelRunner

    def sequences(self, count: int, new_tokens: int, seed: int) -> list[Sequence]:
        """Requests over the base and all adapters in turn."""
        prompts = random_prompts(count, seed=seed)
        return [Sequence(prompt, i % (len(self.adapters) + 1) - 1, new_tokens) for i, prompt in enumerate(prompts)]

    def check(self, sequence: Sequence) -> None:
        """Check that every logit is within tolerance, and that every output token is the oracle's greedy choice."""
        adapter = None if sequence.slot < 0 else self.adapters[sequence.slot]
        want = self.oracle.logits(sequence.tokens[: len(sequence.logits)], adapter)
        assert (torch.stack(sequence.logits) - want).abs().max() < TOLERANCE
        assert sequence.output == want[len(sequence.prompt) - 1 :].argmax(-1).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    directory = tmp_path_factory.mktemp(request.param)
    model_dir = make_checkpoint(request.param, directory)
    adapters = make_adapters(model_dir, directory)
    return Family(model_dir, adapters, Oracle(model_dir, adapters), make_runner(model_dir, adapters))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_27_requests_over_8_adapters_and_the_base_say_what_the_oracle_says(family: Family, chunk: int) -> None:
    sequences = family.sequences(27, 10, seed=1)
    drive(family.runner, sequences, chunk=chunk, seed=chunk)
    for sequence in sequences:
        assert len(sequence.output) == 10
        family.check(sequence)


def test_any_two_adapters_differ_far_beyond_the_tolerance(family: Family) -> None:
    prompt = random_prompts(1, seed=5, shortest=20)[0]
    logits = [family.oracle.logits(prompt, adapter)[-1] for adapter in (None, *family.adapters)]
    for one, other in itertools.combinations(logits, 2):
        assert (one - other).abs().max() > 1000 * TOLERANCE


def test_logits_do_not_depend_on_the_batch(family: Family) -> None:
    crowd = family.sequences(12, 4, seed=2)
    drive(family.runner, crowd, chunk=9)
    for sequence in crowd[:9]:
        alone = Sequence(sequence.prompt, sequence.slot, 4)
        drive(family.runner, [alone], chunk=1000)
        assert alone.output == sequence.output
        assert (torch.stack(alone.logits) - torch.stack(sequence.logits)).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", available_isas())
def test_a_step_of_many_rows_computes_the_same_bits_as_steps_of_few(
    family: Family, isa: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CPU_ISA", isa)
    runner = make_runner(family.model_dir, family.adapters, dtype=dtype, kernels="cpu")
    prompts = random_prompts(9, seed=6, shortest=40)
    many, few = ([Sequence(prompt, i - 1, 1) for i, prompt in enumerate(prompts)] for _ in range(2))
    drive(runner, many, chunk=1000)  # three whole prompts in a step: gate and up are multiplied side by side from 64 rows on
    drive(runner, few, chunk=2)
    for one, other in zip(many, few, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


@pytest.mark.parametrize("mlp", [16, 32, 40, 48])
@pytest.mark.parametrize("isa", available_isas())
def test_a_long_prompt_passes_an_mlp_of_any_width(tmp_path: Path, isa: str, mlp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_checkpoint(FAMILIES[0], tmp_path, intermediate_size=mlp)
    monkeypatch.setenv("MOTET_CPU_ISA", isa)
    sequence = Sequence(random_prompts(1, seed=9, shortest=70, longest=70)[0], -1, 1)
    drive(make_runner(model_dir, [], kernels="cpu"), [sequence], chunk=1000)
    want = Oracle(model_dir, []).logits(sequence.prompt, None)
    assert (torch.stack(sequence.logits) - want).abs().max() < TOLERANCE


def test_a_slot_serves_the_adapter_that_was_loaded_last(family: Family) -> None:
    runner = make_runner(family.model_dir, family.adapters[:3])
    runner.free_adapter(1)
    lonely = Sequence([5, 6, 7], 1, 1, blocks=[0])
    with pytest.raises(ValueError, match="empty"):
        runner.forward(step_batch([lonely], [3], 8))
    runner.load_adapter(1, HostAdapter.from_blob(family.adapters[6].blob, runner.config))
    sequence = Sequence(random_prompts(1, seed=8)[0], 1, 5)
    drive(runner, [sequence], chunk=1000)
    assert sequence.output == family.oracle.greedy(sequence.prompt, 5, family.adapters[6])


def test_the_checkpoints_own_type_is_close_to_fp32(family: Family) -> None:
    runner = make_runner(family.model_dir, family.adapters, dtype="auto")
    sequences = family.sequences(9, 1, seed=4)
    drive(runner, sequences, chunk=1000)
    for sequence in sequences:
        adapter = None if sequence.slot < 0 else family.adapters[sequence.slot]
        want = family.oracle.logits(sequence.prompt, adapter)
        got = torch.stack(sequence.logits)
        assert torch.nn.functional.cosine_similarity(got, want).min() > 0.98


def test_only_the_wanted_rows_come_back_in_their_order(family: Family) -> None:
    sequences = [Sequence([9, 8, 7, 6], -1, 1, blocks=[0]), Sequence([5], 2, 1, blocks=[1]), Sequence([4, 3], 1, 1, blocks=[2])]
    batch = step_batch(sequences, [4, 1, 2], 8)
    everything = family.runner.forward(batch).clone()
    for wanted in ([], [3], [6, 4, 0]):
        batch.logit_rows = batch.token_ids[:0] if not wanted else torch.tensor(wanted).numpy()
        some = family.runner.forward(batch)
        assert some.shape == (len(wanted), everything.shape[1])
        assert some.dtype == torch.float32
        torch.testing.assert_close(some, everything[wanted], rtol=0, atol=1e-5)
