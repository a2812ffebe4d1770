"""Promise: an answer ends at the tokenizer's eos_token too, also where no configuration of the model names it, as with vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from motet.policies.times.step_times import StepTimes
from motet.services.worker.config import WorkerConfig
from motet.services.worker.engines.start_perf import START_PERF
from motet.services.worker.native.assemble import Assembly, assemble
from motet.shared.config import ConfigError
from tests.services.gateway.support_tokenizers import byte_level
from tests.services.worker.support_engine import request, run
from tests.support_models import make_checkpoint

CONFIGURED = 2


def model_dir(path: Path, settings: str) -> Path:
    model = make_checkpoint("llama2", path)
    byte_level().save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(settings)
    return model


def assembled(model: Path) -> Assembly:
    return assemble(WorkerConfig.of(model=str(model), threads=1, kv_blocks=40), model, StepTimes(START_PERF))


def test_an_answer_ends_at_the_token_that_only_the_tokenizer_names(tmp_path: Path) -> None:
    end = byte_level().token_to_id("A")
    model = model_dir(tmp_path, json.dumps({"eos_token": "A"}))
    made = assembled(model)
    assert made.eos_token_ids == {CONFIGURED, end}
    asked = [
        request("tokenizer's", [5], ignore_eos=False, logit_bias={end: 100.0}),
        request("configured", [5], ignore_eos=False, logit_bias={CONFIGURED: 100.0}),
        request("ignored", [5], ignore_eos=True, logit_bias={end: 100.0}, max_tokens=4),
        request("later", [5], ignore_eos=False, logit_bias={end: 100.0}, max_tokens=6, min_tokens=3),
    ]
    result = run(made.engine, asked)
    assert [len(result.tokens[one.request_id]) for one in asked] == [1, 1, 4, 4]
    assert [result.last[one.request_id].finish for one in asked] == ["stop", "stop", "length", "stop"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eos_token": None},
        {"eos_token": "<a token without an embedding>"},  # it gets the next free id
    ],
)
def test_a_tokenizer_without_an_end_token_of_the_model_changes_nothing(tmp_path: Path, settings: dict[str, str | None]) -> None:
    model = model_dir(tmp_path, json.dumps(settings))
    shapes = json.loads((model / "config.json").read_text())
    assert shapes["vocab_size"] <= byte_level().get_vocab_size()
    made = assembled(model)
    assert made.eos_token_ids == {CONFIGURED}


def test_a_tokenizer_that_cannot_be_read_is_refused_by_its_file(tmp_path: Path) -> None:
    model = model_dir(tmp_path, "[]")
    with pytest.raises(ConfigError, match=r"--model: tokenizer_config\.json is not a JSON object"):
        assembled(model)
