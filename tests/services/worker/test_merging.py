"""Promise: the adapter of most requests is merged into a copy of the weights, and no answer depends on the time of that.

The oracle is peft's `merge_and_unload`. A merged and an unmerged computation of the same numbers differ by rounding: in float32
by less than 1e-3 of the largest logit of these models, so greedy tokens are the same but for near-ties.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from motet.policies.memory.ledger import Budget
from motet.policies.step.merge_decision import MergeConfig, MergeCosts, Merging
from motet.policies.step.merged_copy import MERGE, SpareMemory
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.opening import open_engine
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.merged_model import MergedModel
from motet.shared.config import ConfigError
from motet.shared.worker_options import Switch
from tests.services.worker.support_engine import BLOCK_SIZE, Run, make_engine, request, run, wiring
from tests.services.worker.support_graphs import repeated_decodes
from tests.support_models import AdapterFixture, make_adapters, make_checkpoint, random_prompts

UNTUNED = replace(MERGE, decrement=0.0, multiply=1.0)
PAYS = MergeCosts(switch_ms=0.0, step_ms=1.0, row_ms=0.0, lora=1.0)
"""LoRA costs next to nothing in models this small: with measured times and tuned thresholds decisions would depend on noise."""
TIED, UNTIED = "llama3", "llama2"  # tied: embeddings and lm_head are one matrix
ALL_MODULES = 2  # the adapter that changes every module


class Case:
    """A model, and its adapters in the forms of peft and of the engine."""

    def __init__(self, family: str, kernels: str, directory: Path) -> None:
        self.kernels = kernels
        self.model_dir = make_checkpoint(family, directory)
        self.fixtures: list[AdapterFixture] = make_adapters(self.model_dir, directory)
        config = read_model_config(self.model_dir)
        self.adapters = [HostAdapter.from_blob(one.blob, config) for one in self.fixtures]

    def merged_greedy(self, prompts: list[list[int]], count: int, adapter: int) -> list[list[int]]:
        """The greedy answers of peft's merged model."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.model_dir, dtype=torch.float32, attn_implementation="eager"
        )
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            merged = peft.PeftModel.from_pretrained(model, self.fixtures[adapter].path).merge_and_unload().eval()
            answers = []
            for prompt in prompts:
                tokens = list(prompt)
                for _ in range(count):
                    tokens.append(int(merged(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
                answers.append(tokens[len(prompt) :])
        return answers


@pytest.fixture(scope="module", params=[(UNTIED, "cpu"), (TIED, "cpu"), (UNTIED, "reference")], ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp("merging"))


@pytest.fixture(scope="module", params=["cpu", "reference"])
def untied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(UNTIED, request.param, tmp_path_factory.mktemp("merging-untied"))


def merging(case: Case, *, merge: Switch = "on", merge_config: MergeConfig = UNTUNED, **options: Any) -> Engine:
    engine = make_engine(
        case.model_dir, runner_options={"elastic": True, "kernels": case.kernels}, merge=merge, merging=merge_config, **options
    )
    copy, modes = engine.core.copy, engine.core.modes
    if copy is not None:
        assert isinstance(modes, Merging)
        modes.costs, copy.weigh = PAYS, lambda running: None  # type: ignore[method-assign]
    return engine


def whole_copy(engine: Engine, case: Case, adapter: int) -> None:
    """Run requests of one adapter until its merged copy is complete."""
    for number in range(100):
        run(engine, [request(f"before {number} {i}", [7, 8, 9 + i], case.adapters[adapter]) for i in range(4)])
        copy = engine.core.copy
        assert copy is not None
        if copy.whole and copy.adapter == case.adapters[adapter].digest:
            return
    raise AssertionError("no copy became whole")


def merged_steps(result: Run) -> int:
    return sum(stats.merging is not None and bool(stats.merging.merged) for stats in result.steps)


# ---- answers


@pytest.mark.parametrize("adapter", [0, ALL_MODULES, 5])
def test_merged_answers_are_those_of_the_merged_model_of_peft(case: Case, adapter: int) -> None:
    engine, prompts = merging(case), random_prompts(6, seed=adapter)
    whole_copy(engine, case, adapter)
    result = run(engine, [request(str(i), prompt, case.adapters[adapter]) for i, prompt in enumerate(prompts)])
    assert merged_steps(result) == len(result.steps), "no step computed LoRA"
    assert [result.tokens[str(i)] for i in range(6)] == case.merged_greedy(prompts, 12, adapter)


def test_the_answer_to_a_request_is_the_same_in_either_mode_here(case: Case) -> None:
    prompts = random_prompts(6, seed=9)
    requests = [request(str(i), prompt, case.adapters[ALL_MODULES]) for i, prompt in enumerate(prompts)]
    engine = merging(case)
    whole_copy(engine, case, ALL_MODULES)
    assert run(engine, requests).tokens == run(merging(case, merge="off"), requests).tokens


@pytest.mark.parametrize("seed", range(3))
def test_switches_under_random_traffic_lose_nothing_and_change_no_answer(untied: Case, seed: int) -> None:
    draw = random.Random(seed)
    often = MergeConfig(alpha=0.6, beta=0.4, credit=60.0, starving=70.0, normal=60.0)
    engine = merging(untied, max_running=8, merge_config=often)
    requests, prompts = [], random_prompts(90, seed=seed, longest=40)
    for i, prompt in enumerate(prompts):  # three phases: another adapter dominates in each
        favourite = (0, ALL_MODULES, 5)[i // 30]
        chosen = favourite if draw.random() < 0.8 else draw.choice([-1, 1, 3, 6])
        adapter = untied.adapters[chosen] if chosen >= 0 else None
        requests.append(request(str(i), prompt, adapter, max_tokens=draw.randint(1, 24)))
    result = run(engine, requests, per_step=1)
    assert 0 < merged_steps(result) < len(result.steps)
    assert sum(stats.merging.resting for stats in result.steps if stats.merging) > 0
    assert result.tokens == run(merging(untied, merge="off", max_running=8), requests).tokens


# ---- resumed requests, and K and V of either mode


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("merged", [False, True])
def test_a_request_that_another_worker_began_in_the_same_mode_continues_as_it_would_have(
    untied: Case, merged: bool, temperature: float
) -> None:
    merge: Switch = "on" if merged else "off"
    first, second = merging(untied, merge=merge), merging(untied, merge=merge)
    if merged:
        for engine in (first, second):
            whole_copy(engine, untied, ALL_MODULES)
    asked: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "seed": 5}
    adapter, prompt = untied.adapters[ALL_MODULES], list(range(10, 31))
    whole = run(first, [request("a", prompt, adapter, **asked)]).tokens["a"]
    resumed = run(second, [request("a", prompt, adapter, output=whole[:7], epoch=1, **asked)])
    assert resumed.tokens["a"] == whole
    assert merged_steps(resumed) == (len(resumed.steps) if merged else 0)


def test_prompts_are_reused_within_a_mode_only(untied: Case) -> None:
    engine, adapter, prompt = merging(untied), untied.adapters[ALL_MODULES], list(range(10, 90))
    unmerged = run(engine, [request("unmerged", prompt, adapter, max_tokens=1)])
    assert merged_steps(unmerged) == 0
    whole_copy(engine, untied, ALL_MODULES)
    first, again = (run(engine, [request(name, prompt, adapter, max_tokens=1)]) for name in ("first", "again"))
    assert merged_steps(first) == merged_steps(again) == 1
    reusable = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert first.first["first"].cached_tokens == 0
    assert again.first["again"].cached_tokens == reusable


def test_a_sequence_that_saw_a_switch_leaves_no_blocks_of_both_modes(untied: Case) -> None:
    engine, adapter, prompt = merging(untied), untied.adapters[ALL_MODULES], list(range(10, 20))
    crossing = run(engine, [request("crossing", prompt, adapter, max_tokens=150)])
    assert 0 < merged_steps(crossing) < len(crossing.steps)
    unmerged = next(i for i, stats in enumerate(crossing.steps) if stats.merging and stats.merging.merged)
    whole = prompt + crossing.tokens["crossing"]
    engine.unload_adapter(adapter.digest)  # the copy goes, so the next request runs unmerged
    after = run(engine, [request("after", whole, adapter, max_tokens=1)])
    assert merged_steps(after) == 0
    assert 0 < after.first["after"].cached_tokens <= len(prompt) + unmerged


# ---- the torch model


@pytest.mark.parametrize("untied", ["reference"], indirect=True)
def test_graphs_of_merged_steps_are_their_own_and_go_with_the_copy(untied: Case) -> None:
    engine, prompts = merging(untied), random_prompts(4, seed=1)
    runner: Any = engine.runner
    graphs = runner.steps.graphs = repeated_decodes(runner, scratch_block=runner.memory.cache.data.shape[1] - 1)
    runner.merged.dropped = graphs.forget_merged
    for adapter in (0, ALL_MODULES):
        whole_copy(engine, untied, adapter)
        result = run(engine, [request(str(i), prompt, untied.adapters[adapter]) for i, prompt in enumerate(prompts)])
        assert merged_steps(result) == len(result.steps) and any(key[2] for key in graphs.captured)
        assert [result.tokens[str(i)] for i in range(4)] == untied.merged_greedy(prompts, 12, adapter)
    assert engine.unload_adapter(untied.adapters[ALL_MODULES].digest)
    run(engine, [request("base", [5, 6, 7], max_tokens=4)])
    assert graphs.captured and not any(key[2] for key in graphs.captured)


def test_the_torch_model_merges_every_matrix_as_the_product_of_its_factors_says(tmp_path: Path) -> None:
    case = Case(UNTIED, "reference", tmp_path)
    merged, adapter = merging(case).runner.merged, case.adapters[ALL_MODULES]
    assert isinstance(merged, MergedModel)
    pristine = list(merged.model.weights.layers)
    merged.begin(adapter)
    while not merged.advance(lambda: True):
        pass
    model = transformers.AutoModelForCausalLM.from_pretrained(case.model_dir, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = peft.PeftModel.from_pretrained(model, case.fixtures[ALL_MODULES].path).merge_and_unload()
    for number, (layer, theirs) in enumerate(zip(merged.model.weights.layers, whole.model.layers, strict=True)):
        torch.testing.assert_close(layer.o.weight(), theirs.self_attn.o_proj.weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.down.weight(), theirs.mlp.down_proj.weight, rtol=1e-5, atol=1e-6)
        fused = torch.cat([getattr(theirs.self_attn, name).weight for name in ("q_proj", "k_proj", "v_proj")])
        torch.testing.assert_close(layer.qkv.weight(), fused, rtol=1e-5, atol=1e-6)
        assert layer.gate_up is not pristine[number].gate_up
    merged.drop()
    assert merged.nbytes == 0 and merged.model.weights.layers == pristine


def test_memory_beside_fixed_regions_is_no_part_of_them() -> None:
    budget = Budget("device", 100)
    budget.claim("kv", 100, lambda: {"running": 60})
    spare = SpareMemory(budget)
    spare.lends(lambda: {"used": spare.lent_bytes})
    assert spare.lend(40) and spare.lent_bytes == budget.claims["merged"].size_bytes == 40
    budget.check()
    assert spare.lend(0) and budget.total_bytes == budget.claims["kv"].size_bytes == 100


# ---- memory


def test_a_copy_is_given_up_for_requests_that_need_its_memory(untied: Case) -> None:
    engine = merging(untied, kv_blocks=200)
    whole_copy(engine, untied, ALL_MODULES)
    claim = engine.core.memory.claims["merged"]
    assert claim.size_bytes >= engine.runner.merged.nbytes > 0
    requests = [request(str(i), prompt, max_tokens=120) for i, prompt in enumerate(random_prompts(16, seed=3))]
    result = run(engine, requests)
    assert claim.size_bytes == engine.runner.merged.nbytes == 0
    assert result.tokens == run(merging(untied, merge="off", kv_blocks=200), requests).tokens


def test_without_spare_memory_no_copy_is_made(untied: Case) -> None:
    engine = merging(untied, kv_blocks=40)
    result = run(engine, [request(str(i), [5, 6, 7 + i], untied.adapters[ALL_MODULES], max_tokens=40) for i in range(4)])
    assert merged_steps(result) == 0 and engine.core.memory.claims["merged"].size_bytes == 0


def test_the_copy_of_an_adapter_that_was_deleted_goes(untied: Case) -> None:
    engine = merging(untied)
    whole_copy(engine, untied, ALL_MODULES)
    assert engine.unload_adapter(untied.adapters[ALL_MODULES].digest)
    run(engine, [request("base", [5, 6, 7], max_tokens=2)])
    assert engine.runner.merged.nbytes == 0 and engine.core.memory.claims["merged"].size_bytes == 0


# ---- who cannot


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "int8"}, "int8"),
        ({"elastic": False}, "--device-memory shared"),
        ({"kernels": "reference", "elastic": False}, "--device-memory shared"),
    ],
)
def test_a_backend_that_cannot_merge_refuses_with_the_reason(untied: Case, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine(untied.model_dir, runner_options={"elastic": True} | options, merge="on")


def test_vllm_refuses_to_merge(untied: Case) -> None:
    config = WorkerConfig.of(model=str(untied.model_dir), engine="vllm", merge="on")
    with pytest.raises(ConfigError, match="vLLM computes every adapter beside the weights"):
        open_engine(config, untied.model_dir, wiring())
