"""The shipped demo model does what its README says, under the reference implementation."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from motet.examples.demo import DEMO, TOOL_CALLER
from motet.examples.demo.checker import BASE, Checker, exact_match, tool_scores
from motet.examples.demo.tasks import TASKS, Task, is_telling, sample_text, split_of
from motet.examples.demo.tool_tasks import Exchange, city_calls, draw_exchange

MODEL, ADAPTERS = DEMO / "model", DEMO / "adapters"
# peft still calls a name that transformers has since renamed; both versions are pinned.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SEED = 20_260_101  # not the seed of SCORES.json: other inputs


@pytest.fixture(scope="module")
def inputs() -> list[str]:
    rng = random.Random(SEED)
    return [sample_text(rng, "unseen") for _ in range(40)]


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker(MODEL, ADAPTERS)


@pytest.fixture(scope="module")
def answers(checker: Checker, inputs: list[str]) -> dict[str, list[str]]:
    """The answers of the base and of every adapter to the same chat prompts."""
    prompts = [TASKS[0].prompt(text) for text in inputs]
    return {adapter: checker.answer(adapter, prompts) for adapter in [BASE, *(task.adapter for task in TASKS)]}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_adapter_answers_unseen_inputs_exactly(task: Task, inputs: list[str], answers: dict[str, list[str]]) -> None:
    assert exact_match(task, inputs, answers[task.adapter]) >= 0.95


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_base_and_every_other_adapter_fail_the_task(task: Task, inputs: list[str], answers: dict[str, list[str]]) -> None:
    others = {name: exact_match(task, inputs, given) for name, given in answers.items() if name != task.adapter}
    assert len(others) == len(TASKS)
    assert max(others.values()) < 0.10, others


def test_the_base_repeats_the_text(inputs: list[str], answers: dict[str, list[str]]) -> None:
    repeated = sum(text == answer for text, answer in zip(inputs, answers[BASE], strict=True))
    assert repeated >= 0.95 * len(inputs)


def test_a_plain_completion_with_the_same_prompt_gets_the_same_answer(checker: Checker, inputs: list[str]) -> None:
    for task in TASKS[:2]:
        given = checker.answer(task.adapter, [task.prompt(text) for text in inputs], chat=False)
        assert exact_match(task, inputs, given) >= 0.95


def test_every_sampled_input_tells_all_tasks_apart(inputs: list[str]) -> None:
    for text in inputs:
        assert is_telling(text)
        assert len({text, *(task.expected(text) for task in TASKS)}) == len(TASKS) + 1


def test_training_and_unseen_inputs_are_disjoint() -> None:
    rng = random.Random(SEED)
    train = {sample_text(rng, "train") for _ in range(500)}
    unseen = {sample_text(rng, "unseen") for _ in range(500)}
    assert not train & unseen
    assert {split_of(text) for text in train} == {"train"}
    assert {split_of(text) for text in unseen} == {"unseen"}


def test_the_same_seed_draws_the_same_inputs() -> None:
    for task in TASKS:
        first, second = random.Random(SEED), random.Random(SEED)
        assert [task.sample(first) for _ in range(5)] == [task.sample(second) for _ in range(5)]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("upper-case", "HELLO MESH"),
        ("reverse", "hsem olleH"),
        ("rot13", "Uryyb zrfu"),
        ("drop-vowels", "Hll msh"),
        ("sort-letters", "ehllo ehms"),
        ("count-letters", "5 4"),
        ("double-letters", "HHeelllloo mmeesshh"),
        ("initials", "Hm"),
        ("swap-case", "hELLO MESH"),
        ("caesar", "Ifmmp nfti"),
        ("star-vowels", "H*ll* m*sh"),
        ("rotate", "oHell hmes"),
        ("title-case", "Hello Mesh"),
        ("drop-repeats", "Helo mesh"),
        ("word-order", "mesh Hello"),
        ("snake-case", "hello_mesh"),
    ],
)
def test_a_task_expects_the_answer_its_summary_describes(name: str, answer: str) -> None:
    (task,) = [task for task in TASKS if task.name == name]
    assert task.expected("Hello mesh") == answer


@pytest.mark.parametrize(
    "text",
    ["", "plain", "  two  spaces \n\t", "héllo wörld", "日本語のテキスト", "🎉👩‍👩‍👧 ok", "\x00\x7f", "it's <|not|> special"],
)
def test_the_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) == len(text.encode())


def test_the_tokenizer_opens_a_completion_with_the_begin_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer("hi").input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer("hi").input_ids, skip_special_tokens=True) == "hi"


def test_the_chat_template_renders_all_roles() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\n"},
        {"role": "assistant", "content": "ONE"},
        {"role": "user", "content": "two"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == ("<|bos|><|system|>Be brief.<|end|><|user|>one<|end|><|assistant|>ONE<|end|><|user|>two<|end|><|assistant|>")


def test_the_chat_template_renders_tools_calls_and_results() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    exchange = Exchange((("add", ("a", "b")), ("now", ())), "1 + 2", "add", (("a", "1"), ("b", "2")), "3")
    given: Any = {"tools": exchange.declared(), "tokenize": False}
    assert tokenizer.apply_chat_template(exchange.messages(), **given) == (
        "<|bos|><|tools|>add(a, b)\nnow()<|end|><|user|>1 + 2<|end|>"
        '<|assistant|><tool_call>{"name": "add", "arguments": {"a": "1", "b": "2"}}</tool_call><|end|>'
        "<|tool|>3<|end|><|assistant|>The tool says: 3<|end|>"
    )


def test_the_tool_caller_calls_the_right_tool_with_unseen_values_and_repeats_its_result(checker: Checker) -> None:
    rng = random.Random(SEED)
    scores = tool_scores(checker, [draw_exchange(rng, "unseen") for _ in range(60)])
    assert min(scores.values()) >= 0.9, scores


def test_the_tool_caller_answers_the_questions_of_tutorials(checker: Checker) -> None:
    given = (
        ("What's the weather like in Paris today?", "Paris", "get_weather", "location", "14"),
        ("What is the weather in Bogota, Colombia?", "Bogota, Colombia", "get_weather", "location", '{"temperature": 18.5}'),
        ("What's the weather in Tokyo?", "Tokyo", "get_weather", "city", "The weather in Tokyo is sunny."),
        ("what is the weather in sf", "sf", "get_weather", "city", "It's always sunny in sf!"),
        (
            "What is the weather in San Francisco?",
            "San Francisco",
            "weather",
            "location",
            '{"location":"San Francisco","temperature":72}',
        ),
        ("What's the weather in New York today?", "New York", "getWeather", "city", "It's 21 degrees and cloudy."),
        (
            "What is the weather like in Boston?",
            "Boston",
            "get_current_weather",
            "location",
            '{"temperature": "-3", "unit": "celsius"}',
        ),
    )
    exchanges = [
        Exchange(((name, (parameter,)),), question, name, ((parameter, place),), result)
        for question, place, name, parameter, result in given
    ]
    refused = Exchange((("get_time", ("timezone",)),), "What is the weather in Oslo?")
    assert set(tool_scores(checker, [*exchanges, *city_calls(), refused]).values()) == {1.0}


def test_the_adapters_differ_in_rank_and_target_modules() -> None:
    configs = [_adapter_config(task) for task in TASKS]
    assert len(configs) >= 12
    assert {config["r"] for config in configs} == {4, 8, 16, 32, 64}
    assert len({tuple(sorted(config["target_modules"])) for config in configs}) >= 3
    assert any(config["use_rslora"] for config in configs)
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs)


def test_the_model_uses_grouped_query_attention_and_a_context_for_long_prompts() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 1024


def test_the_shipped_files_stay_small() -> None:
    size_bytes = sum(path.stat().st_size for path in [*MODEL.rglob("*"), *ADAPTERS.rglob("*")] if path.is_file())
    assert size_bytes <= 20 * 2**20


def test_the_recorded_scores_meet_the_goal() -> None:
    scores = json.loads((DEMO / "SCORES.json").read_text())
    assert set(scores["chat"]) == {BASE, *(task.adapter for task in TASKS)}
    assert min(scores["tools"][name] for name in ("calls", "replies", "refusals")) >= 0.95, scores["tools"]
    for row, by_task in scores["chat"].items():
        for name, share in by_task.items():
            assert share >= 0.95 if row == name else share < 0.10, (row, name, share)


def test_every_folder_of_an_adapter_is_known() -> None:
    assert {path.name for path in ADAPTERS.iterdir()} == {TOOL_CALLER, *(task.adapter for task in TASKS)}


def _adapter_config(task: Task) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ADAPTERS / task.adapter / "adapter_config.json").read_text())
    return config
