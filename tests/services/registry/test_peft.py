"""Promise: a blob contains what PEFT computes, and options that would be computed differently are refused by name."""

from __future__ import annotations

import io
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.services.registry.patterns import assign
from motet.services.registry.peft import Converted, convert
from motet.shared.adapter_blob import BlobModule, read_index, safetensors_header
from motet.shared.errors import InvalidAdapter, MotetError, TooLarge
from motet.shared.model import MODULES
from tests.support_adapters import TINY, TINY_CONFIG, peft_config, random_tensors, safetensors_bytes

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def run(weights: bytes, config: bytes, *, max_rank: int = 64, max_bytes: int = 1 << 20) -> Converted:
    return convert(config, io.BytesIO(weights), len(weights), TINY, max_rank=max_rank, max_bytes=max_bytes)


def matrices(blob: bytes) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray, float]]:
    """{(layer, module): (A, B, scale)} of an F32 blob, read independently of the writer."""
    index = read_index(blob, len(blob))
    assert index.dtype == "F32"
    return {
        (layer, part.module): (*halves(blob, part, layer, "<f4"), part.scales[layer])
        for part in index.parts
        for layer in range(index.layers)
        if part.ranks[layer]
    }


def halves(blob: bytes, part: BlobModule, layer: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] and B [out, rank], rank by rank from the pages."""
    layers, width = len(part.ranks), part.fan_in + part.fan_out
    numbers = np.frombuffer(blob, kind, part.pages * layers * 8 * width, part.start).reshape(part.pages, layers, 8 * width)
    ranks = [(numbers[rank // 8, layer], rank % 8) for rank in range(part.ranks[layer])]
    a = [row[at * part.fan_in : (at + 1) * part.fan_in] for row, at in ranks]
    b = [row[8 * part.fan_in :][at * part.fan_out : (at + 1) * part.fan_out] for row, at in ranks]
    return np.stack(a), np.stack(b, axis=1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers warns of its own properties
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_that_peft_made_has_the_same_matrices_and_scales_in_its_blob(tmp_path: Path, rslora: bool):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**{k: v for k, v in TINY_CONFIG.items() if k not in ("architectures", "model_type")})),
        LoraConfig(
            r=4,
            lora_alpha=12,
            use_rslora=rslora,
            target_modules="all-linear",
            init_lora_weights=False,
            rank_pattern={"q_proj": 8, r"^model\.layers\.1\.mlp\..*": 2, "layers.0.mlp.down_proj": 6},
            alpha_pattern={r"model.layers.[01].self_attn.(k|v)_proj": 32, "o_proj": 1},
        ),
    )
    model.save_pretrained(str(tmp_path))
    weights = (tmp_path / "adapter_model.safetensors").read_bytes()
    converted = run(weights, (tmp_path / "adapter_config.json").read_bytes())

    found = matrices(converted.blob)
    assert len(found) == 2 * len(MODULES) and converted.rank == 8 and converted.modules == MODULES and converted.layers == 2
    expected_scales = set()
    for (layer, module), (a, b, scale) in found.items():
        lora = model.get_submodule("base_model.model." + TINY.path(layer, module))
        np.testing.assert_array_equal(a, lora.lora_A["default"].weight.detach().numpy())
        np.testing.assert_array_equal(b, lora.lora_B["default"].weight.detach().numpy())
        assert scale == pytest.approx(lora.scaling["default"], rel=1e-12)
        expected_scales.add(scale)
    assert len(expected_scales) >= 4  # the patterns did make a difference


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_keep_their_dtype_bit_for_bit(dtype: str):
    tensors = random_tensors(modules=("k_proj", "up_proj"))
    weights = safetensors_bytes(tensors, dtype)
    converted = run(weights, peft_config(modules=("k_proj", "up_proj")))
    assert converted.dtype == dtype
    source, _, start = safetensors_header(weights, len(weights))
    index = read_index(converted.blob, len(converted.blob))
    for part, layer in itertools.product(index.parts, range(index.layers)):
        for half, matrix in zip("AB", halves(converted.blob, part, layer, "<u4" if dtype == "F32" else "<u2"), strict=True):
            info = source[f"base_model.model.{TINY.path(layer, part.module)}.lora_{half}.weight"]
            assert matrix.tobytes() == weights[start + info.data_offsets[0] : start + info.data_offsets[1]]


def test_mixed_dtypes_become_f32_without_loss():
    tensors = {key: value.astype(np.float16).astype(np.float32) for key, value in random_tensors().items()}
    bf16 = {key: (value.view("<u4") & 0xFFFF0000).view("<f4") for key, value in tensors.items()}
    mixed = dict(tensors)
    half, brain, *_ = tensors
    mixed[brain] = bf16[brain]
    converted = run(safetensors_bytes(mixed, dtype_of={half: "F16", brain: "BF16"}), peft_config())
    a, b, _ = matrices(converted.blob)[0, "q_proj"]
    np.testing.assert_array_equal(a, mixed[half])
    np.testing.assert_array_equal(b, mixed[brain])


def test_equal_content_has_an_equal_digest_whatever_the_order_and_form_of_the_file():
    tensors = random_tensors(modules=MODULES)
    first = run(safetensors_bytes(tensors), peft_config(modules=MODULES))
    shuffled = {key.replace(".weight", ".default.weight"): tensors[key] for key in sorted(tensors, key=lambda key: key[::-1])}
    second = run(safetensors_bytes(shuffled), peft_config(modules=MODULES, rank=4, alpha=4, use_rslora=True))
    assert first.digest == second.digest  # 8 / 4 and 4 / sqrt(4) are the same scale
    other = run(safetensors_bytes(tensors), peft_config(modules=MODULES, alpha=9))
    assert other.digest != first.digest


def test_a_single_layer_and_a_single_module_are_enough():
    converted = run(
        safetensors_bytes(random_tensors(layers=[1], modules=["down_proj"], rank=1)), peft_config(rank=1, modules=["down_proj"])
    )
    assert (converted.layers, converted.modules, converted.rank) == (1, ("down_proj",), 1)


CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"peft_type": "IA3"}, "peft_type", "only LORA"),
    ({"r": 0}, "r", ">= 1"),
    ({"r": "four"}, "r", "Expected `int`"),
    ({"lora_alpha": None}, "lora_alpha", "lora_alpha"),
    ({"bias": "all"}, "bias", "trained biases"),
    ({"use_dora": True}, "use_dora", "DoRA"),
    ({"lora_bias": True}, "lora_bias", "biases on lora_B"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out", "transposed"),
    ({"modules_to_save": ["score"]}, "modules_to_save", "replaces whole modules"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save", "the file does not hold"),
    ({"use_merged_linear": True}, "use_merged_linear", "fused layers"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices", "embeddings"),
    ({"megatron_config": {"a": 1}}, "megatron_config", "Megatron"),
    ({"layer_replication": [[0, 2]]}, "layer_replication", "another base model"),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens", "activated"),
    ({"kasa_config": {"beta": 1}}, "kasa_config", "base weights"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights", "rewrites the base weights"),
    ({"init_lora_weights": "olora"}, "init_lora_weights", "rewrites the base weights"),
    ({"target_modules": ["embed_tokens"]}, "target_modules", "leave out every tensor"),
    ({"target_modules": []}, "target_modules", "leave out every tensor"),
    ({"target_modules": "q_(proj"}, "target_modules", "not a regular expression"),
    ({"target_modules": "(.|.)*" * 28 + "!"}, "target_modules", "more time or memory"),
    ({"exclude_modules": ".*"}, "target_modules", "leave out every tensor"),
    ({"target_modules": "all-linear", "layers_to_transform": [0]}, "layers_to_transform", "cannot be used"),
    ({"layers_pattern": "layers"}, "layers_pattern", "needs layers_to_transform"),
    ({"a_key_of_tomorrow": True}, "a_key_of_tomorrow", "not known here"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern", ">= 1"),
    ({"rank_pattern": {"q_(proj": 4}}, "rank_pattern", "not a regular expression"),
    ({"alpha_pattern": {"(.|.)" * 28 + "!": 4}}, "alpha_pattern", "more time or memory"),
    ({"alpha_pattern": {"x" * 5000: 4}}, "alpha_pattern", "longer than"),
    ({"rank_pattern": {"q_proj": 8}}, "r", "rank_pattern['q_proj'] says 8"),
    ({"r": 5}, "r", "rank 4, but r says 5"),
]


@pytest.mark.parametrize(
    ("extra", "param", "reason"), CONFIGS, ids=[next(iter(c[0])) + "-" + str(i) for i, c in enumerate(CONFIGS)]
)
def test_a_config_that_would_compute_something_else_is_refused_by_key(extra: dict[str, Any], param: str, reason: str):
    with pytest.raises(InvalidAdapter) as refused:
        run(safetensors_bytes(random_tensors()), peft_config(**extra))
    assert reason in refused.value.message and refused.value.param == param and refused.value.status == 400


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"peft_type": "LORA"}'])
def test_a_config_that_is_not_one_is_refused(text: bytes):
    with pytest.raises(InvalidAdapter):
        run(safetensors_bytes(random_tensors()), text)


def test_harmless_config_keys_are_ignored():
    extra = {"loftq_config": {}, "megatron_core": "megatron.core", "init_lora_weights": "gaussian"}
    extra |= {"target_modules": "all-linear", "eva_config": None, "peft_version": "9.9", "a_key_of_tomorrow": False}
    assert run(safetensors_bytes(random_tensors()), peft_config(**extra)).rank == 4


MS_SWIFT = {  # what `swift.tuners.LoRAConfig` wrote before it became PEFT's
    "swift_type": "LORA",
    "use_qa_lora": False,
    "use_merged_linear": False,
    "enable_lora": None,
    "lora_dtype": "bf16",
    "lorap_lr_ratio": 16.0,
    "lorap_emb_lr": 1e-06,
    "model_key_mapping": None,
    "group_size": None,
}
ALPACA_LORA = {"enable_lora": None, "merge_weights": True}  # PEFT 0.2
UNSLOTH = {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}, "unsloth_fixed": True}


@pytest.mark.parametrize("keys", [MS_SWIFT, ALPACA_LORA, UNSLOTH])
def test_training_keys_of_other_tools_change_nothing(keys: dict[str, Any]):
    weights = safetensors_bytes(random_tensors())
    assert run(weights, peft_config(**keys)).digest == run(weights, peft_config()).digest


def test_every_key_of_the_pinned_peft_is_known():
    import dataclasses

    from peft import LoraConfig

    from motet.services.registry.peft_config import MEANINGLESS, UNSUPPORTED, PeftConfig

    keys = {field.name for field in dataclasses.fields(LoraConfig)}
    assert keys <= MEANINGLESS | UNSUPPORTED.keys() | set(PeftConfig.__struct_fields__)


def renamed(old: str, new: str) -> dict[str, np.ndarray]:
    return {key.replace(old, new): value for key, value in random_tensors().items()}


def changed(key: str, value: np.ndarray | None) -> dict[str, np.ndarray]:
    tensors = random_tensors() | ({key: value} if value is not None else {})
    if value is None:
        del tensors[key]
    return tensors


def poisoned(key: str, value: float) -> dict[str, np.ndarray]:
    tensors = random_tensors()
    tensors[key][1, 2] = value
    return tensors


TENSORS: list[tuple[str, dict[str, np.ndarray], str]] = [
    ("no tensors", {}, "no LoRA matrices"),
    ("unknown module", renamed("q_proj", "c_attn"), "c_attn.lora_A.weight: not a LoRA matrix"),
    ("embedding", renamed("layers.0.self_attn.q_proj", "embed_tokens"), "embed_tokens.lora_A.weight: not a LoRA matrix"),
    ("wrong block", renamed("self_attn.q_proj", "mlp.q_proj"), "mlp.q_proj.lora_A.weight: not a LoRA matrix"),
    ("whole module", changed("base_model.model.model.norm.weight", np.ones(4, np.float32)), "norm.weight"),
    ("DoRA magnitude", changed(f"{Q0}.lora_magnitude_vector", np.ones(48, np.float32)), "lora_magnitude_vector"),
    ("bias", changed(f"{Q0}.lora_B.bias", np.ones(48, np.float32)), "lora_B.bias"),
    ("layer out of range", renamed("layers.1.", "layers.2."), "layers 0 to 1"),
    ("A without B", changed(f"{Q0}.lora_B.weight", None), "lora_B of the same module is missing"),
    ("B without A", changed(f"{Q0}.lora_A.weight", None), "lora_A of the same module is missing"),
    ("wrong input size", changed(f"{Q0}.lora_A.weight", np.ones((4, 33), np.float32)), "the base model's layer has 32 inputs"),
    (
        "wrong output size",
        changed(f"{Q0}.lora_B.weight", np.ones((32, 4), np.float32)),
        "the base model's layer has 48 outputs",
    ),
    ("ranks disagree", changed(f"{Q0}.lora_A.weight", np.ones((5, 32), np.float32)), "rank 5, but r says 4"),
    ("not a matrix", changed(f"{Q0}.lora_A.weight", np.ones(32, np.float32)), "not a matrix"),
    ("twice", changed(f"{Q0}.lora_A.default.weight", np.ones((4, 32), np.float32)), "twice"),
    ("NaN", poisoned(f"{Q0}.lora_A.weight", np.nan), "NaN or infinity at [1, 2]"),
    ("infinity", poisoned(f"{Q0}.lora_B.weight", -np.inf), "NaN or infinity at [1, 2]"),
]


@pytest.mark.parametrize(("tensors", "reason"), [case[1:] for case in TENSORS], ids=[case[0] for case in TENSORS])
def test_tensors_that_do_not_fit_are_refused_by_name(tensors: dict[str, np.ndarray], reason: str):
    modules = ("q_proj", "v_proj", "c_attn", "embed_tokens")
    with pytest.raises(InvalidAdapter) as refused:
        run(safetensors_bytes(tensors), peft_config(modules=modules))
    assert reason in refused.value.message


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_a_number_is_found_in_every_dtype_and_large_numbers_are_not_mistaken_for_it(dtype: str, value: float):
    with pytest.raises(InvalidAdapter, match=r"NaN or infinity at \[1, 2\]"):
        run(safetensors_bytes(poisoned(f"{Q0}.lora_A.weight", value), dtype), peft_config())
    assert run(safetensors_bytes(poisoned(f"{Q0}.lora_A.weight", -60_000.0), dtype), peft_config()).dtype == dtype


def test_a_rank_over_the_limit_is_refused():
    with pytest.raises(InvalidAdapter, match="rank 16 is over the limit of 8") as refused:
        run(safetensors_bytes(random_tensors(rank=16)), peft_config(rank=16), max_rank=8)
    assert refused.value.param == "r"


def test_a_file_over_the_size_limit_is_refused_before_it_is_read():
    class Unreadable(io.BytesIO):
        def read(self, *_: Any) -> bytes:
            raise AssertionError("read")

    with pytest.raises(TooLarge, match="the limit is 100"):
        convert(peft_config(), Unreadable(), 101, TINY, max_rank=8, max_bytes=100)


def test_a_small_file_whose_whole_pages_are_over_the_size_limit_is_refused_with_both_numbers():
    weights = safetensors_bytes(random_tensors(layers=[1], modules=["down_proj"], rank=1))
    with pytest.raises(TooLarge, match=r"needs \d+ bytes in whole pages of 8 ranks over 2 layers, the limit is 2000"):
        run(weights, peft_config(rank=1, modules=["down_proj"]), max_bytes=2000)


def with_header(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A0 = f"{Q0}.lora_A.weight"
FILES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "shorter than"),
    ("short", b"\1\0\0", "shorter than"),
    ("not safetensors", b"PK\3\4" + b"x" * 100, "does not fit"),
    ("header length bomb", struct.pack("<Q", 1 << 62) + b"{}", "does not fit"),
    ("header over the limit", struct.pack("<Q", 5 << 20) + b" " * (5 << 20), "the limit is 4194304"),
    ("header not JSON", with_header(b"not json at all"), "bad header"),
    ("header nested for ever", with_header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000), "bad header"),
    ("shape bomb", with_header({A0: tensor([999_999_999] * 100_000, 0, 4)}, b"1234"), "bad header"),
    ("huge dimension", with_header({A0: tensor([1 << 62, 1], 0, 4)}, b"1234"), "bad header"),
    ("negative dimension", with_header({A0: tensor([-1, -1], 0, 4)}, b"1234"), "bad header"),
    ("offsets beyond the end", with_header({A0: tensor([4, 32], 0, 512)}, b"1234"), "pass the end"),
    ("offsets backwards", with_header({A0: tensor([0, 32], 4, 0)}, b"1234"), "offsets"),
    ("overlap", with_header({A0: tensor([1], 0, 4), "b": tensor([1], 2, 6)}, b"123456"), "overlap"),
    ("gap", with_header({A0: tensor([1], 0, 4), "b": tensor([1], 6, 10)}, b"1234567890"), "leave a gap"),
    ("shape lies", with_header({A0: tensor([4, 32], 0, 4)}, b"1234"), "does not fill"),
    ("bytes behind", with_header({A0: tensor([1], 0, 4)}, b"12345678"), "bytes after the last tensor"),
    ("unknown dtype", with_header({A0: tensor([4, 32], 0, 4, "F8_E4M3")}, b"1234"), "dtype F8_E4M3"),
    ("double precision", with_header({A0: tensor([4, 32], 0, 1024, "F64")}, bytes(1024)), "dtype F64"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_a_corrupt_or_hostile_file_is_refused_with_the_reason(data: bytes, reason: str):
    with pytest.raises(InvalidAdapter) as refused:
        run(data, peft_config(), max_bytes=1 << 24)
    assert reason in refused.value.message


def test_every_truncation_of_a_good_file_is_refused():
    weights = safetensors_bytes(random_tensors(layers=[0], modules=["q_proj"]))
    for size in {*range(0, len(weights), 37), len(weights) - 1}:
        with pytest.raises(MotetError):
            run(weights[:size], peft_config())


def test_patterns_mean_what_peft_means_by_them():
    from peft.utils.other import get_pattern_key

    paths = TINY.paths()
    for keys in (
        ["q_proj"],
        ["proj"],
        ["layers.0.self_attn.q_proj", "q_proj", "model.layers.1.mlp.up_proj"],
        ["model.layers.0", "layers.1.mlp.down_proj", "self_attn.o_proj"],
        ["model.layers.0.self_attn.q.proj"],  # a dot means any character
        [".*"],
        [r"^model\.layers\.1\..*", "q_proj"],
        [r"layers\.\d+\.mlp\.(up|down)_proj", ".*self_attn.*"],
        ["(q|k)_proj", r"mlp\.[gu].*"],
        [r"^q_proj$", "v_proj$"],
    ):
        expected = {path: key for path in paths if (key := get_pattern_key(keys, path)) != path or path in keys}
        assert assign("rank_pattern", keys, paths) == expected, keys


def test_no_patterns_and_no_matches_start_no_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a process was started"))
    assert assign("rank_pattern", [], TINY.paths()) == {}
    assert assign("rank_pattern", ["elsewhere.q_proj"], TINY.paths()) == {}


@pytest.mark.parametrize("name", ["model.language_model.", "language_model.model.", "model.text_model."])
def test_an_adapter_of_a_model_that_takes_images_changes_its_text_model(name: str):
    tensors = random_tensors()
    weights = {key.replace("base_model.model.model.", f"base_model.model.{name}"): value for key, value in tensors.items()}
    assert set(weights).isdisjoint(tensors)
    assert run(safetensors_bytes(weights), peft_config()).digest == run(safetensors_bytes(tensors), peft_config()).digest
    vision = {key.replace("model.model.layers", "model.model.vision_tower.layers"): value for key, value in tensors.items()}
    with pytest.raises(InvalidAdapter, match="vision_tower"):
        run(safetensors_bytes(vision), peft_config())
