"""Promise: Motet reads config.json as transformers' own classes do, in every spelling that a field has.

Raw objects, with each spelling alone and with spellings that contradict each other, go to the class of transformers and to
Motet's reader; every field that the engine uses is compared, and the rotary frequencies number by number.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from motet.services.worker.engines.model_config import ModelConfig, parse_model_config
from motet.services.worker.native.model import inverse_frequencies
from motet.shared.base_shapes import shapes_of
from motet.shared.hf_config import DEFAULTS, FAMILIES, SPELLINGS, UnsupportedModel, canonical, contradictions

CLASSES: dict[str, type[PreTrainedConfig]] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NEW = {"rope_type": "default", "rope_theta": 5e5}

ABSENT = "absent"
SPELLED: dict[str, list[dict[str, Any]]] = {
    "dtype": [
        {"dtype": dtype, "torch_dtype": old}
        for dtype, old in itertools.product((ABSENT, None, "bfloat16", "float32"), (ABSENT, None, "float16"))
    ],
    "rope": [
        {"rope_scaling": scaling, "rope_parameters": parameters, "rope_theta": theta}
        for scaling, parameters, theta in itertools.product(
            (ABSENT, None, {}, YARN, LINEAR, LLAMA3, YARN | {"rope_theta": 2e4}, {"rope_type": "default"}),
            (ABSENT, None, {}, NEW, YARN | NEW, LINEAR, NEW | LLAMA3),
            (ABSENT, 1e6),
        )
    ],
    "rope type": [
        {"rope_scaling": {"factor": 2.0} | kind}
        for kind in (
            {"type": "linear"},
            {"rope_type": "linear"},
            {"rope_type": "linear", "type": "dynamic"},
            {"type": "dynamic"},
        )
    ],
    "length before stretching": [
        {
            "rope_scaling": {key: value for key, value in rope.items() if value != ABSENT},
            "original_max_position_embeddings": outer,
        }
        for rope, outer in itertools.product(
            (
                YARN,
                YARN | {"original_max_position_embeddings": ABSENT},
                LLAMA3,
                LLAMA3 | {"original_max_position_embeddings": 64},
            ),
            (ABSENT, 256),
        )
    ],
    "yarn's numbers": [
        {"rope_parameters": YARN | NEW | {"rope_type": "yarn"} | more}
        for more in (
            {"factor": None},
            {"attention_factor": 1.5},
            {"mscale": 0.7, "mscale_all_dim": 0.5},
            {"mscale": 0.7},
            {"beta_fast": 16, "beta_slow": 2},
            {"beta_fast": None, "beta_slow": None},
            {"truncate": False},
        )
    ],
    "partial rotary": [{"partial_rotary_factor": 1.0}, {"rope_parameters": NEW | {"partial_rotary_factor": 1.0}}],
    "key and value heads": [{"num_key_value_heads": heads} for heads in (ABSENT, None, 4)],
    "size of a head": [{"head_dim": size} for size in (ABSENT, 32)],
    "sliding window": [
        {"sliding_window": window, "use_sliding_window": used, "max_window_layers": first, "layer_types": kinds}
        for window, used, first, kinds in itertools.product(
            (ABSENT, None, 128),
            (ABSENT, True, False),
            (ABSENT, 1),
            (ABSENT, None, ["full_attention"] * 3, ["attention", "sliding_attention", "full_attention"]),
        )
    ],
    "biases": [{"attention_bias": one, "mlp_bias": other} for one, other in itertools.product((ABSENT, True, False), repeat=2)],
    "end tokens": [{"eos_token_id": value} for value in (ABSENT, None, 7, [7, 9])],
    "names of other models": [
        {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16, "layer_norm_eps": 0.5, "n_kv_heads": 1}
    ],
    "what is left out": [
        {name: ABSENT}
        for name in ("vocab_size", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "max_position_embeddings")
    ],
    "ties": [{"tie_word_embeddings": True}],
}


def raw(architecture: str, spelled: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture],
        "vocab_size": 300,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    return {key: copy.deepcopy(value) for key, value in (config | spelled).items() if value != ABSENT}


def frequencies(theirs: PreTrainedConfig) -> tuple[torch.Tensor, float]:
    """What any of the four models rotates by: their classes are copies of Llama's."""
    rotary = LlamaRotaryEmbedding(theirs)
    return rotary.inv_freq, rotary.attention_scaling


def theirs_as_ours(theirs: PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """The fields of ModelConfig, as transformers' models read them from their configuration."""
    heads = theirs.num_attention_heads
    eos = theirs.eos_token_id
    windows = (0,) * theirs.num_hidden_layers
    if architecture == "MistralForCausalLM":
        windows = (theirs.sliding_window or 0,) * theirs.num_hidden_layers
    elif hasattr(theirs, "layer_types") and "Qwen" in architecture:
        windows = tuple((theirs.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in theirs.layer_types)
    biased = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and theirs.attention_bias
    return {
        "architecture": architecture,
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_layers": theirs.num_hidden_layers,
        "num_heads": heads,
        "num_kv_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", theirs.hidden_size // heads),
        "max_model_len": theirs.max_position_embeddings,
        "rms_norm_eps": theirs.rms_norm_eps,
        "windows": windows,
        "qkv_bias": biased or architecture == "Qwen2ForCausalLM",
        "o_bias": biased,
        "mlp_bias": architecture == "LlamaForCausalLM" and theirs.mlp_bias,
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "tied_embeddings": theirs.tie_word_embeddings,
        "dtype": str(theirs.dtype or torch.float32).removeprefix("torch."),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        "quantization": None,
    }


@pytest.mark.parametrize("group", SPELLED)
@pytest.mark.parametrize("architecture", CLASSES)
def test_every_spelling_means_what_it_means_to_transformers(architecture: str, group: str) -> None:
    compared = 0
    for spelled in SPELLED[group]:
        config = raw(architecture, spelled)
        try:
            theirs = CLASSES[architecture].from_dict(copy.deepcopy(config))
        except StrictDataclassFieldValidationError:
            continue  # a file that transformers refuses
        ours: ModelConfig = parse_model_config(config)
        mine = {field.name: getattr(ours, field.name) for field in dataclasses.fields(ours) if field.name != "rope"}
        assert mine == theirs_as_ours(theirs, architecture), spelled
        turns, scale = frequencies(theirs)
        found, factor = inverse_frequencies(ours.rope, ours.head_dim)
        assert torch.allclose(found, turns, rtol=1e-6, atol=0) and factor == pytest.approx(scale, rel=1e-12), spelled
        shapes = shapes_of(config)
        assert (shapes.heads, shapes.kv_heads, shapes.head_dim) == (ours.num_heads, ours.num_kv_heads, ours.head_dim)
        compared += 1
    assert compared >= len(SPELLED[group]) - 1


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_defaults_are_those_of_transformers(architecture: str) -> None:
    kind = FAMILIES[architecture]
    theirs = {field.name: field.default for field in dataclasses.fields(CLASSES[architecture])}
    assert {name: theirs[name] for name in DEFAULTS[kind]} == DEFAULTS[kind]
    assert CLASSES[architecture].model_type == kind


@pytest.mark.parametrize("architecture", CLASSES)
def test_no_served_architecture_has_an_alias_that_the_table_lacks(architecture: str) -> None:
    assert CLASSES[architecture].attribute_map == {}


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.field)
def test_the_reader_may_read_what_it_has_read(spelling: Any) -> None:
    config = canonical(raw("Qwen2ForCausalLM", {"rope_scaling": YARN, "torch_dtype": "float16"}))
    assert canonical(config) == config
    assert contradictions(config) == []


def test_a_scaling_that_hides_the_base_frequency_is_told() -> None:
    config = raw("LlamaForCausalLM", {"rope_scaling": LINEAR, "rope_parameters": NEW})
    assert parse_model_config(config).rope.theta == 10_000.0, "as in transformers: rope_scaling counts as a whole"
    (line,) = contradictions(config)
    assert line.startswith("config.json: rope_scaling {") and "not rope_parameters {" in line and "500000" in line


def test_spellings_that_agree_are_not_told() -> None:
    assert contradictions(raw("LlamaForCausalLM", {"rope_scaling": YARN, "rope_parameters": YARN, "dtype": None})) == []


def test_a_model_type_of_another_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json: model_type is 'mistral': architectures names LlamaForCausalLM"):
        parse_model_config(raw("LlamaForCausalLM", {"model_type": "mistral"}))


def test_the_model_type_alone_names_the_architecture() -> None:
    assert parse_model_config(raw("Qwen3ForCausalLM", {"architectures": ABSENT})).qk_norm


def test_the_architecture_alone_brings_the_defaults_of_its_type() -> None:
    assert parse_model_config(raw("MistralForCausalLM", {"model_type": ABSENT})).num_kv_heads == 8


@pytest.mark.parametrize("value", [5, [1], "yarn"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rope_that_is_no_object_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {name} is .*: an object is expected"):
        parse_model_config(raw("LlamaForCausalLM", {name: value}))
