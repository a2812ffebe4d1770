"""The supported contents of config.json, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet.services.worker.engines.model_config import UnsupportedModel, parse_model_config, read_model_config
from motet.services.worker.native.device_memory import kv_bytes_per_block
from motet.shared.model import MODULES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128008],
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": None}


def test_llama_3_1_reads_as_published() -> None:
    config = parse_model_config(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.max_model_len, config.dtype) == (128, 8, 131072, "bfloat16")
    assert (config.rope.type, config.rope.theta, config.rope.factor, config.rope.original_max_len) == (
        "llama3",
        500000.0,
        8.0,
        8192,
    )
    assert config.windows == (0,) * 32
    assert config.eos_token_ids == (128001, 128008)
    assert tuple(config.projection_shapes()) == MODULES
    assert config.projection_shapes()["k_proj"] == (4096, 1024)


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    new = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA["rope_scaling"] | {"rope_theta": 500000.0}
    assert parse_model_config(new) == parse_model_config(LLAMA)
    assert parse_model_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}}).rope.type == "linear"


def test_generation_config_decides_about_eos() -> None:
    assert parse_model_config(LLAMA, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert parse_model_config(LLAMA, {"eos_token_id": [7, 8, 7]}).eos_token_ids == (7, 8)
    assert parse_model_config(LLAMA, {"eos_token_id": None}).eos_token_ids == (128001, 128008)
    assert parse_model_config(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_every_family_has_its_own_biases_and_norms() -> None:
    llama, qwen2 = parse_model_config(LLAMA | {"attention_bias": True, "mlp_bias": True}), parse_model_config(QWEN2)
    qwen3 = parse_model_config(QWEN2 | {"architectures": ["Qwen3ForCausalLM"]})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (False, False, False, True)


def test_sliding_windows_follow_each_familys_rule() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert set(parse_model_config(mistral | {"sliding_window": 4096}).windows) == {4096}
    assert set(parse_model_config(mistral | {"sliding_window": None}).windows) == {0}
    assert set(parse_model_config(QWEN2 | {"sliding_window": 32768, "use_sliding_window": False}).windows) == {0}
    on = QWEN2 | {"sliding_window": 512, "use_sliding_window": True}
    assert parse_model_config(on | {"max_window_layers": 28}).windows == (0,) * 28 + (512,) * 4
    kinds = ["sliding_attention", "full_attention"] * 16
    assert parse_model_config(on | {"layer_types": kinds}).windows == (512, 0) * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 31}, "head_dim is 0"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000: at most 4096"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": 1e39}, "rope_theta is 1e\\+39"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"per_layer_config": {"0": {"hidden_size": 8}}}, "per_layer_config"),
        ({"text_config": {"hidden_size": 8}}, "text_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}, "rope_scaling": None}, "yarn needs another base"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 65}, "head_dim"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "between layer types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_model_config(LLAMA | change)


def test_a_directory_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UnsupportedModel, match="not a JSON object"):
        read_model_config(tmp_path)


def test_a_kv_block_costs_what_its_tensors_hold() -> None:
    config = parse_model_config(LLAMA)
    assert kv_bytes_per_block(config, dtype="auto", block_size=16) == 32 * 16 * 2 * 8 * 128 * 2
    assert kv_bytes_per_block(config, dtype="float32", block_size=1) == 32 * 2 * 8 * 128 * 4
    int8 = kv_bytes_per_block(config, dtype="auto", block_size=16, kv_cache_dtype="int8")
    assert int8 == 32 * 16 * 2 * 8 * (128 + 4), "a scale for each key and value of a head"
