"""Promise: a base model that cannot be served is refused before any service starts, in one line, without torch and quickly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.cli.preflight import preflight
from motet.examples.demo import DEMO
from motet.services.worker.engines.model_config import read_model_config
from motet.shared.config import ConfigError


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO / "model", tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda home: edit(home / "config.json", **changes)


def generation(**changes: Any) -> Callable[[Path], None]:
    return lambda home: edit(home / "generation_config.json", **changes)


def without(name: str) -> Callable[[Path], None]:
    return lambda home: (home / name).unlink()


def cut(home: Path) -> None:
    path = home / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def in_two_shards(home: Path) -> None:
    tensors = load_file(home / "model.safetensors")
    (home / "model.safetensors").unlink()
    save_file(tensors, home / "model-1.safetensors")
    save_file({"model.norm.weight": torch.ones_like(tensors["model.norm.weight"])}, home / "model-2.safetensors")
    names = dict.fromkeys(tensors, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
    (home / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def with_another_tensor(home: Path) -> None:
    path = home / "model.safetensors"
    save_file(load_file(path) | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}, path)


def negative_end_token(home: Path) -> None:
    edit(home / "generation_config.json", eos_token_id=None)
    edit(home / "config.json", eos_token_id=-1)


def nested(home: Path) -> None:
    (home / "config.json").write_text('{"a":' * 100_000)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config.json": (without("config.json"), "has no config.json"),
    "no tokenizer": (without("tokenizer.json"), "has no tokenizer.json"),
    "no weights": (without("model.safetensors"), "has neither model.safetensors nor"),
    "a file that ends early": (cut, "model.safetensors is not a readable safetensors file"),
    "a tensor in two files": (in_two_shards, "tensor model.norm.weight is in both model-1.safetensors and model-2.safetensors"),
    "a tensor of a layer too many": (with_another_tensor, "does not imply, as model.layers.9.mlp.up_proj.weight"),
    "another architecture": (config(architectures=["GPT2LMHeadModel"]), "config.json: architectures is"),
    "an absurd number of layers": (config(num_hidden_layers=10**7), "config.json: num_hidden_layers is 10000000: at most"),
    "an absurd vocabulary": (config(vocab_size=10**12), "config.json: vocab_size is 1000000000000: at most"),
    "an absurd width": (config(intermediate_size=10**9), "config.json: intermediate_size is 1000000000: at most"),
    "an absurd length": (config(max_position_embeddings=10**15), "config.json: max_position_embeddings is"),
    "rope_theta NaN": (config(rope_theta=float("nan"), rope_parameters=None), "config.json: rope_theta is nan"),
    "rms_norm_eps infinite": (config(rms_norm_eps=float("inf")), "config.json: rms_norm_eps is inf"),
    "rms_norm_eps infinite, as transformers writes it": (
        config(rms_norm_eps={"__float__": "Infinity"}),
        "config.json: rms_norm_eps is inf",
    ),
    "a negative end token": (negative_end_token, "config.json: eos_token_id is -1"),
    "a negative end token for generation": (
        generation(eos_token_id=[2, -7]),
        "generation_config.json: eos_token_id is [2, -7]",
    ),
    "repetition_penalty 0": (generation(repetition_penalty=0), "generation_config.json: repetition_penalty is 0"),
    "max_new_tokens negative": (generation(max_new_tokens=-5), "generation_config.json: max_new_tokens is -5"),
    "temperature NaN": (generation(temperature=float("nan")), "generation_config.json: temperature is nan"),
    "top_p as text": (generation(top_p="0.9"), "generation_config.json: top_p is '0.9'"),
    "config.json nested without end": (nested, "config.json cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_refused_in_one_line_that_says_where(model_dir: Path, case: str) -> None:
    spoil, reason = BROKEN[case]
    spoil(model_dir)
    began = perf_counter()
    with pytest.raises(ConfigError) as refused:
        preflight(model_dir)
    message = str(refused.value)
    assert message.startswith("--model: ") and reason in message
    assert "\n" not in message and len(message) < 500
    assert perf_counter() - began < 5, "seconds at most, also on a busy machine"


def test_a_good_model_passes_without_a_word(model_dir: Path) -> None:
    assert preflight(model_dir) == []
    assert preflight(model_dir, engine="vllm") == []


def test_two_spellings_that_disagree_are_noted(model_dir: Path) -> None:
    edit(model_dir / "config.json", dtype="float32", torch_dtype="bfloat16")
    assert preflight(model_dir) == ['config.json: dtype "float32" counts, not torch_dtype "bfloat16"']


def test_an_end_token_beyond_the_vocabulary_is_noted_and_ignored(model_dir: Path) -> None:
    edit(model_dir / "generation_config.json", eos_token_id=[2, 288, 999])
    assert preflight(model_dir) == [
        "generation_config.json: eos_token_id [288, 999] is beyond the vocabulary of 288: it is ignored"
    ]
    assert read_model_config(model_dir).eos_token_ids == (2,)


def test_weights_are_not_looked_for_where_random_ones_are_served(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    preflight(model_dir, load_format="dummy")


def test_for_vllm_only_what_holds_there_is_checked(model_dir: Path) -> None:
    with_another_tensor(model_dir)
    edit(model_dir / "config.json", architectures=["Phi3ForCausalLM"], model_type="phi3", hidden_act="gelu")
    preflight(model_dir, engine="vllm")
    cut(model_dir)
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        preflight(model_dir, engine="vllm")


def test_no_torch_is_loaded() -> None:
    check = "import sys; from motet.cli.preflight import preflight; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", check], check=True)
