"""Reads `adapter_config.json`, key by key.

Options that would change the result and that workers do not compute are refused by name: an adapter that runs and answers
wrongly is worse than a refusal. Options that only say how an adapter was made are accepted without effect.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from motet.services.registry.files import CONFIG, MAX_CONFIG_BYTES, quoted, shown
from motet.shared.errors import InvalidAdapter

_Rank = Annotated[int, Meta(ge=1)]


class PeftConfig(msgspec.Struct, frozen=True):
    """The keys of `adapter_config.json` that affect the result."""

    peft_type: str
    r: _Rank
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True


MEANINGLESS = {
    # how it was made or trained, not what it computes
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode", "task_type", "lora_dropout",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
    # the first versions of PEFT: whether training kept the weights merged while it evaluated
    "merge_weights",
    # ms-swift before 2.4 and SwiftConfig: the type that training computed in, learning rates of LoRA+, names of its own
    "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr", "lr_ratio", "swift_type", "model_key_mapping",
    # Unsloth: whether it had repaired the tokenizer that it trained with
    "unsloth_fixed",
}  # fmt: skip

UNSUPPORTED = {
    "use_dora": "DoRA rescales the base weights",
    "lora_bias": "biases on lora_B are not computed",
    "fan_in_fan_out": "transposed base weights are not supported",
    "trainable_token_indices": "changed token embeddings are not supported",
    "megatron_config": "Megatron's parallel layers are not supported",
    "layer_replication": "replicated layers would be another base model",
    "target_parameters": "adapters on bare parameters are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "use_qalora": "QALoRA is not supported",
    "use_qa_lora": "QALoRA is not supported",
    "use_merged_linear": "one matrix pair for several fused layers is not supported",
    "enable_lora": "one matrix pair for several fused layers is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "Arrow routing between adapters is not supported",
    "kasa_config": "KaSA changes the base weights",
    "monteclora_config": "sampled adapters are not supported",
}

_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # initialisations that also rewrite the base weights
SAVED_WHOLE = ("embed_tokens", "lm_head")  # modules of which a file may hold an unchanged copy


def parse_config(text: bytes, file: str = CONFIG) -> PeftConfig:
    """`adapter_config.json`, checked key by key. Raises InvalidAdapter naming the key and the reason.

    `file`: where it is from, for people.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise InvalidAdapter(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        raw = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidAdapter(f"{file} is not a JSON object: {shown(error)}") from None
    if raw.get("peft_type") != "LORA":
        raise InvalidAdapter(f"peft_type is {quoted(raw.get('peft_type'))}: only LORA adapters are served", param="peft_type")
    for key, value in raw.items():
        if not value or key in MEANINGLESS or key in PeftConfig.__struct_fields__:
            continue
        reason = UNSUPPORTED.get(key, "its meaning is not known here, so the result could be wrong")
        raise InvalidAdapter(f"{shown(key)} is set in {file}: {reason}", param=shown(key))
    known = {k: v for k, v in raw.items() if k in PeftConfig.__struct_fields__ and v is not None}
    try:
        config = msgspec.convert(known, PeftConfig)
    except msgspec.ValidationError as error:
        where = re.search(r"`\$\.(\w+)|field `(\w+)`", str(error))
        raise InvalidAdapter(f"{file}: {shown(error)}", param=where and (where[1] or where[2])) from None
    _check_values(config)
    _check_layers(config)
    return config


def _check_values(config: PeftConfig) -> None:
    if config.bias != "none":
        raise InvalidAdapter(f"bias is {quoted(config.bias)}: trained biases are not supported", param="bias")
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights.lower().startswith(_CHANGES_BASE):
        raise InvalidAdapter(
            f"init_lora_weights is {quoted(config.init_lora_weights)}, which rewrites the base weights: convert it to a "
            "plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)",
            param="init_lora_weights",
        )
    for name in config.modules_to_save or ():
        if name.rsplit(".", 1)[-1] not in SAVED_WHOLE:
            raise InvalidAdapter(
                f"modules_to_save names {quoted(name)}: it replaces whole modules of the base model, which is shared by all "
                "adapters",
                param="modules_to_save",
            )


def _check_layers(config: PeftConfig) -> None:
    """Refuse combinations that PEFT refuses to load."""
    for key in ("layers_to_transform", "layers_pattern"):
        if isinstance(config.target_modules, str) and getattr(config, key) is not None:
            raise InvalidAdapter(f"{key} cannot be used when target_modules is a text (PEFT refuses it too)", param=key)
    if config.layers_pattern and config.layers_to_transform is None:
        raise InvalidAdapter("layers_pattern needs layers_to_transform (PEFT refuses it too)", param="layers_pattern")
