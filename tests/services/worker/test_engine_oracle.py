"""The engine against transformers + peft: the same tokens, whatever else is in the batch and however the work is cut.

One plain run per family is checked against the oracle, token by token; all other runs must say the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from motet.kernels.cpu import available_isas
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.request import EngineRequest
from tests.services.worker.support_engine import make_engine, request, run
from tests.support_models import FAMILIES, AdapterFixture, Oracle, make_adapters, make_checkpoint, random_prompts

COUNT = 27  # three requests on each of 8 adapters and the base
NEW_TOKENS = 10


@dataclass
class Family:
    """A checkpoint, its adapters (None is the base model), and the answers of an undisturbed run of the engine."""

    model_dir: Path
    oracle: Oracle
    fixtures: list[AdapterFixture | None]
    adapters: list[HostAdapter | None]
    prompts: list[list[int]]
    answers: list[list[int]]

    def adapter(self, number: int) -> HostAdapter | None:
        return self.adapters[number % len(self.adapters)]

    def requests(self, order: list[int] | None = None) -> list[EngineRequest]:
        numbers = order if order is not None else range(COUNT)
        return [request(str(i), self.prompts[i], self.adapter(i), max_tokens=NEW_TOKENS) for i in numbers]

    def expected(self) -> dict[str, list[int]]:
        return {str(i): answer for i, answer in enumerate(self.answers)}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    directory = tmp_path_factory.mktemp(request.param)
    model_dir = make_checkpoint(request.param, directory)
    fixtures = make_adapters(model_dir, directory)
    config = read_model_config(model_dir)
    adapters = [None, *(HostAdapter.from_blob(fixture.blob, config) for fixture in fixtures)]
    prompts = random_prompts(COUNT, seed=7, longest=50)
    prompts[9:18] = [[*prompts[0], *prompt[:5]] for prompt in prompts[9:18]]  # a common beginning, all adapters
    family = Family(model_dir, Oracle(model_dir, fixtures), [None, *fixtures], adapters, prompts, [])
    result = run(make_engine(model_dir), family.requests())
    family.answers = [result.tokens[str(i)] for i in range(COUNT)]
    assert max(step.decode_rows for step in result.steps) == COUNT
    assert max(step.distinct_adapters for step in result.steps) == 8
    return family


def test_every_token_of_27_concurrent_requests_is_the_one_the_oracle_says(family: Family) -> None:
    for i, (prompt, answer) in enumerate(zip(family.prompts, family.answers, strict=True)):
        logits = family.oracle.logits(prompt + answer, family.fixtures[i % len(family.fixtures)])
        greedy = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert answer == greedy, f"request {i}"
        assert len(answer) == NEW_TOKENS


@pytest.mark.parametrize("kernels", ["reference", *available_isas()])
def test_every_kernel_and_instruction_set_says_the_same(family: Family, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_KERNELS", "reference" if kernels == "reference" else "cpu")
    monkeypatch.setenv("MOTET_CPU_ISA", "" if kernels == "reference" else kernels)
    result = run(make_engine(family.model_dir, max_step_tokens=100), family.requests())
    assert result.tokens == family.expected()


def test_a_worker_whose_compiled_kernels_are_damaged_says_so_and_serves_without_them(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = tmp_path / "cpu.so"
    damaged.write_bytes(b"no library")
    monkeypatch.setenv("MOTET_KERNELS", "auto")
    monkeypatch.setattr("motet.kernels.cpu.library.build", lambda isa: damaged)
    result = run(make_engine(family.model_dir), family.requests())
    assert result.tokens == family.expected()
    [warning] = [one for one in caplog.records if one.getMessage() == "compiled CPU kernels are missing"]
    assert str(damaged) in vars(warning)["reason"]


def test_adapters_change_the_answer(family: Family) -> None:
    base = run(make_engine(family.model_dir), [request(str(i), prompt) for i, prompt in enumerate(family.prompts)])
    same = [i for i in range(COUNT) if family.adapter(i) and base.tokens[str(i)][:NEW_TOKENS] == family.answers[i]]
    assert not same, "these requests cannot tell their adapter from the base"


@pytest.mark.parametrize("max_step_tokens", [9, 33])
def test_the_chunk_size_does_not_matter(family: Family, max_step_tokens: int) -> None:
    engine = make_engine(family.model_dir, max_step_tokens=max_step_tokens)
    result = run(engine, family.requests())
    assert result.tokens == family.expected()
    assert max(step.prefill_tokens + step.decode_rows for step in result.steps) <= max_step_tokens


def test_other_requests_in_the_batch_do_not_matter(family: Family) -> None:
    order = list(range(COUNT))
    random.Random(3).shuffle(order)
    result = run(make_engine(family.model_dir, prefix_cache=False), family.requests(order), per_step=2)
    assert result.tokens == family.expected()


def test_preempted_requests_continue_as_if_nothing_had_happened(family: Family) -> None:
    engine = make_engine(family.model_dir, kv_blocks=40)
    result = run(engine, family.requests())
    assert result.total("preempted") > 0
    assert result.tokens == family.expected()
    assert engine.kv_blocks_free == 40


def test_too_few_adapter_slots_only_cost_time(family: Family) -> None:
    result = run(make_engine(family.model_dir, max_loras=2), family.requests())
    assert result.tokens == family.expected()
    assert max(step.distinct_adapters for step in result.steps) == 2


def test_a_second_round_is_served_from_the_prefix_cache(family: Family) -> None:
    engine = make_engine(family.model_dir)
    first = run(engine, family.requests())
    second = run(engine, family.requests())
    assert second.tokens == first.tokens == family.expected()
    reusable = sum((len(prompt) - 1) // 8 * 8 for prompt in family.prompts)
    assert second.total("cached_tokens") == reusable > first.total("cached_tokens")


def test_a_request_resumes_from_every_token_of_its_output(family: Family) -> None:
    cuts = [
        request(f"{i}@{cut}", family.prompts[i], family.adapter(i), output=family.answers[i][:cut], max_tokens=NEW_TOKENS)
        for i in range(0, COUNT, 2)
        for cut in range(NEW_TOKENS + 1)
    ]
    result = run(make_engine(family.model_dir, prefix_cache=False), cuts)
    assert result.tokens == {one.request_id: family.answers[int(one.request_id.split("@")[0])] for one in cuts}
    assert all(item.finish == "length" for item in result.last.values())
