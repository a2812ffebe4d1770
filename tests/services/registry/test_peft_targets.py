"""Promise: the modules that an adapter changes are those that PEFT would change with the same two files."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motet.services.registry.peft import Converted, convert
from motet.services.registry.targets import DEFAULT_MODELS, DEFAULT_TARGETS
from motet.shared.adapter_blob import read_index
from motet.shared.base_shapes import BaseShapes
from motet.shared.errors import InvalidAdapter
from motet.shared.model import MODULES
from tests.services.registry.test_peft import matrices
from tests.support_adapters import TINY_CONFIG, peft_config, random_tensors, safetensors_bytes

LAYERS = 3
SHAPES = BaseShapes(hidden_size=32, intermediate_size=48, layers=LAYERS, heads=4, kv_heads=2, head_dim=12, model_type="llama")
TENSORS = random_tensors(shapes=SHAPES, modules=MODULES, scale=0.3)
WEIGHTS = safetensors_bytes(TENSORS)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers warns of its own properties
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT warns of tensors that it leaves out
]


def run(config: bytes, weights: bytes = WEIGHTS) -> Converted:
    return convert(config, io.BytesIO(weights), len(weights), SHAPES, max_rank=64, max_bytes=1 << 22)


@pytest.fixture(scope="module")
def base() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    keys = {k: v for k, v in TINY_CONFIG.items() if k not in ("architectures", "model_type")}
    return LlamaForCausalLM(LlamaConfig(**(keys | {"num_hidden_layers": LAYERS}))).eval()


@pytest.fixture(scope="module")
def as_peft(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], Any]:
    """Loads `WEIGHTS` with a configuration into a copy of the base; returns the model, or the error that PEFT raises."""
    from peft import PeftModel

    directory = tmp_path_factory.mktemp("adapter")
    (directory / "adapter_model.safetensors").write_bytes(WEIGHTS)

    def load(config: bytes) -> Any:
        (directory / "adapter_config.json").write_bytes(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return PeftModel.from_pretrained(copy.deepcopy(base), str(directory)).eval()
            except Exception as error:
                return error

    return load


def check(config: bytes, base: Any, as_peft: Callable[[bytes], Any]) -> Converted | None:
    """Compare with PEFT: which modules, which logits. None where both refuse."""
    import torch

    theirs = as_peft(config)
    try:
        ours = run(config)
    except InvalidAdapter as refused:
        assert isinstance(theirs, Exception), f"PEFT loads it, here it is refused: {refused.message}"
        return None
    assert not isinstance(theirs, Exception), f"PEFT refuses it: {theirs!r}"
    found = matrices(ours.blob)
    targeted = set(theirs.base_model.targeted_module_names)
    assert {SHAPES.path(*at) for at in found} == targeted
    assert set(ours.left_out) == set(SHAPES.paths()) - targeted
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for at, (a, b, scale) in found.items():
            merged.get_submodule(SHAPES.path(*at)).weight += torch.from_numpy(scale * (b @ a))
        tokens = torch.arange(12).reshape(1, 12) * 5 % 64
        np.testing.assert_allclose(merged(tokens).logits, theirs(tokens).logits, atol=2e-5)
    return ours


FULL = "model.layers.1.self_attn.q_proj"
FORMS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["self_attn.q_proj", "1.mlp.up_proj"]},
    {"target_modules": [FULL, "down_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": ["q_proj", "not_in_this_model"]},
    {"target_modules": None},
    {"target_modules": []},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r"model\.layers\.[02]\.mlp\..*_proj"},
    {"target_modules": r"layers.0.self_attn.q_proj"},
    {"target_modules": "q_proj"},
    {"target_modules": "all-linear"},
    {"target_modules": "ALL-Linear", "exclude_modules": ["k_proj"]},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.1.self_attn.k_proj", FULL]},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.2\..*"},
    {"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [7]},
    {"target_modules": [FULL, "up_proj"], "layers_to_transform": [0]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "blocks"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "l.y[e]rs"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "(other|layers)"},
    {"target_modules": ["q_proj"], "layers_pattern": "layers"},
    {"target_modules": ".*q_proj", "layers_to_transform": [1]},
    {"target_modules": ".*q_proj", "layers_pattern": []},
    {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"k_proj": 64, r"1\.self_attn\.q_proj": 32, "q_proj": 2}},
    {"target_modules": ["q_proj"], "alpha_pattern": {f"^{FULL}": 32}, "rank_pattern": {"up_proj": 9}},
]


@pytest.mark.parametrize("form", FORMS, ids=[str(number) for number in range(len(FORMS))])
def test_the_selected_modules_and_the_logits_are_those_of_peft(form: dict[str, Any], base: Any, as_peft: Any):
    check(peft_config(**form), base, as_peft)


NAMES = [
    "q_proj",
    "k_proj",
    "down_proj",
    "self_attn.v_proj",
    "mlp.up_proj",
    "0.mlp.gate_proj",
    FULL,
    "model.layers.2.mlp.up_proj",
]
EXPRESSIONS = [r".*\.[qk]_proj", r".*layers\.(0|2)\..*_proj", "mlp", "all-linear", r"model\.layers\.1.*_proj"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.fixed_dictionaries(
        {"target_modules": st.lists(st.sampled_from(NAMES), min_size=1, unique=True) | st.sampled_from(EXPRESSIONS)},
        optional={
            "exclude_modules": st.lists(st.sampled_from(NAMES), unique=True),
            "layers_to_transform": st.integers(0, 3) | st.lists(st.integers(0, 3), unique=True),
            "layers_pattern": st.sampled_from(["layers", "", [], ["layers", "h"]]),
            "alpha_pattern": st.dictionaries(st.sampled_from(NAMES), st.sampled_from([2, 32])),
        },
    )
)
def test_any_combination_of_keys_means_what_it_means_to_peft(form: dict[str, Any], base: Any, as_peft: Any):
    check(peft_config(**form), base, as_peft)


def test_long_lists_of_full_paths_beside_layers_are_refused_since_peft_may_shorten_them():
    paths = SHAPES.paths()
    with pytest.raises(InvalidAdapter, match="may shorten"):
        run(peft_config(target_modules=paths, layers_to_transform=[0]))
    assert run(peft_config(target_modules=paths)).left_out == ()


def test_default_targets_are_those_of_peft():
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as MAPPING

    assert all(MAPPING[model] == list(DEFAULT_TARGETS) for model in DEFAULT_MODELS)


def test_left_out_modules_are_named_and_their_tensors_are_not_checked():
    broken = {key: value * np.nan if "k_proj" in key else value for key, value in TENSORS.items()}
    made = run(peft_config(target_modules=["q_proj"]), safetensors_bytes(broken))
    assert read_index(made.blob, len(made.blob)).modules == ("q_proj",)
    assert len(made.left_out) == 18 and "model.layers.0.self_attn.k_proj" in made.left_out


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_names_with_and_without_the_prefix_of_peft_mean_the_same(prefix: str, tmp_path: Path):
    tensors = {key.replace("base_model.model.", prefix, 1): value for key, value in TENSORS.items()}
    made = run(peft_config(modules=MODULES), safetensors_bytes(tensors))
    assert made.digest == run(peft_config(modules=MODULES)).digest
    inner = {key.replace("base_model.model.model.", prefix, 1): value for key, value in TENSORS.items()}
    assert run(peft_config(modules=MODULES), safetensors_bytes(inner)).digest == made.digest


def test_paths_in_a_configuration_are_written_like_those_of_the_file():
    tensors = {key.replace("model.model.layers", "model.model.language_model.layers"): v for key, v in TENSORS.items()}
    made = run(peft_config(target_modules=r"model\.language_model\.layers\.1\.mlp\.up_proj"), safetensors_bytes(tensors))
    assert list(matrices(made.blob)) == [(1, "up_proj")]
    assert json.dumps(made.left_out).count("language_model") == 20
