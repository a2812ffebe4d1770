"""Promise: under a worker, vLLM's answers end at the tokens at which `vllm serve` ends them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from motet.examples.demo import DEMO
from motet.services.worker.vllm_engine.core import end_tokens

pytestmark = pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm")


@pytest.mark.parametrize("tokenizers", ["a", None], ids=["tokenizer", "no tokenizer"])
@pytest.mark.parametrize("generation", [{"eos_token_id": [1, 3]}, {"eos_token_id": 1}, {}], ids=["list", "one", "none"])
@pytest.mark.parametrize("configured", [4, None], ids=["config", "no config"])
def test_the_tokens_that_end_an_answer_are_those_of_vllm(
    tmp_path: Path, tokenizers: str | None, generation: dict[str, Any], configured: int | None
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import cached_tokenizer_from_config

    shutil.copytree(DEMO / "model", tmp_path / "model")
    edit(tmp_path / "model/config.json", eos_token_id=configured)
    edit(tmp_path / "model/tokenizer_config.json", eos_token=tokenizers)
    (tmp_path / "model/generation_config.json").write_text(json.dumps(generation))
    model = AsyncEngineArgs(model=str(tmp_path / "model"), dtype="float32").create_model_config()
    tokenizer = cached_tokenizer_from_config(model)
    asked = SamplingParams()
    asked.update_from_generation_config(model.try_get_generation_config(), tokenizer.eos_token_id)
    expected = {*asked.stop_token_ids, asked.eos_token_id} - {None}
    unread = {configured} - {None} if not generation else set()  # Motet falls back to config.json
    assert end_tokens(model, tokenizer) == expected | unread


def edit(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
