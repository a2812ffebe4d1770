"""Reads `config.json` of a Hugging Face model: the one reader of gateway, registry, workers and the command line. No torch.

    read_config(model_dir) -> dict        every field under one name, with transformers' defaults

Many fields have two spellings, and files exist that have both. `SPELLINGS` lists them all, in the order in which transformers 5
takes them (vLLM reads a configuration through transformers). `contradictions` tells where two spellings disagree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from motet.shared.config import ConfigError

MAX_JSON_BYTES = 16 << 20
QUOTED_CHARS = 200
SIZE_MAX = 1 << 24
LAYERS_MAX = 4096
LENGTH_MAX = 1 << 31
"""The largest sizes, numbers of layers and lengths that a configuration may have: larger ones are mistakes, and allocate."""
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""The architectures of the native engine and their `model_type`."""


class UnsupportedModel(ConfigError):
    """A model that cannot be served; the message names the file, the field or tensor, and the reason."""


class Spelling(NamedTuple):
    """A field and where it may be found. A dot leads into an object; a null or an empty object counts as absent."""

    field: str
    places: tuple[str, ...]
    """The spellings. The first that is there is taken."""
    otherwise: Any = None
    """The value if none is there: another field's, with "=", or this one."""


SPELLINGS = (
    Spelling("dtype", ("dtype", "torch_dtype")),
    Spelling("num_key_value_heads", ("num_key_value_heads",), "=num_attention_heads"),
    # As a whole: where rope_scaling is there, nothing of rope_parameters counts, not even its rope_theta.
    Spelling("rope_parameters", ("rope_scaling", "rope_parameters")),
    Spelling("rope_parameters.rope_type", ("rope_parameters.rope_type", "rope_parameters.type"), "default"),
    Spelling("rope_parameters.rope_theta", ("rope_parameters.rope_theta", "rope_theta"), 10_000.0),
    Spelling("rope_parameters.partial_rotary_factor", ("rope_parameters.partial_rotary_factor", "partial_rotary_factor")),
    Spelling(
        "rope_parameters.original_max_position_embeddings",
        ("original_max_position_embeddings", "rope_parameters.original_max_position_embeddings"),
        "=max_position_embeddings",
    ),
)
"""Fields with several spellings. No served architecture has further ones: the `attribute_map` of its class in transformers is
empty, so `n_embd` and the like mean nothing."""

_DECODER = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_QWEN = _DECODER | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _DECODER
    | {
        "vocab_size": 32_000,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 2,
    },
    "mistral": _DECODER
    | {
        "vocab_size": 32_000,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
}
"""{model_type: the values of fields that a file leaves out}, as transformers' classes have them. A null is not left out."""


def shorten(text: str) -> str:
    """`text`, cut to `QUOTED_CHARS`: files are quoted in messages of one line."""
    return text if len(text) <= QUOTED_CHARS else f"{text[: QUOTED_CHARS - 3]}..."


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file. Raises UnsupportedModel."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise UnsupportedModel(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB")
        value = _plain(json.loads(data.decode("utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsupportedModel(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} is not a JSON object")
    return value


def read_config(model_dir: Path) -> dict[str, Any]:
    """`canonical` of the `config.json` in `model_dir`. Raises UnsupportedModel, also when there is none."""
    return canonical(read_raw_config(model_dir))


def read_raw_config(model_dir: Path) -> dict[str, Any]:
    """The `config.json` in `model_dir` as it is. Raises UnsupportedModel."""
    config = read_json(model_dir / "config.json")
    if config is None:
        raise UnsupportedModel(f"{model_dir} has no config.json: a Hugging Face model directory is expected")
    return config


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model of a decoded `config.json`, with each field under the first name in `SPELLINGS`, and with defaults.

    Values are not checked, except that objects are objects. Raises UnsupportedModel. Idempotent.
    """
    return _resolved(config)[0]


def contradictions(config: Mapping[str, Any]) -> list[str]:
    """For people: each field of a decoded `config.json` that has two spellings with different values, and which one counts."""
    return _resolved(config)[1]


def refused(key: str, value: Any, why: str) -> UnsupportedModel:
    """The error for a field of `config.json`."""
    return UnsupportedModel(f"config.json: {key} is {shorten(repr(value))}: {why}")


def size_in(config: Mapping[str, Any], key: str, *, default: int | None = None, most: int = SIZE_MAX) -> int:
    """A size of a decoded `config.json`, from 1 to `most`; a null counts as missing. Raises UnsupportedModel."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise UnsupportedModel(f"config.json: {key} is missing")
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refused(key, value, "a positive whole number is expected")
    if value > most:
        raise refused(key, value, f"at most {most} is supported")
    return value


def _resolved(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    found, lines = _text(config), []
    for field, places, otherwise in SPELLINGS:
        told = [(place, value) for place in places if (value := _at(found, place)) is not None]
        lines += [
            f"config.json: {told[0][0]} {shorten(json.dumps(told[0][1]))} counts, not {place} {shorten(json.dumps(value))}"
            for place, value in told[1:]
            if value != told[0][1]
        ]
        if told:
            value = told[0][1]
        else:
            value = _at(found, otherwise[1:]) if isinstance(otherwise, str) and otherwise.startswith("=") else otherwise
        if field == "rope_parameters":
            value = dict(value or {})
            found.pop("rope_scaling", None)
        if value is not None:
            inside, _, name = field.rpartition(".")
            (found[inside] if inside else found)[name] = value
    return found, lines


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that describes the text model, with defaults: all, or `text_config` of a model that takes images."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    kind = text.get("model_type")
    if kind is None:
        names = text.get("architectures")
        kind = next((FAMILIES[name] for name in map(str, names) if name in FAMILIES), None) if isinstance(names, list) else None
    outer = {name: config.get(name) for name in ("dtype", "torch_dtype") if text is inner and name in config}
    return outer | DEFAULTS.get(str(kind), {}) | dict(text)


def _at(config: Mapping[str, Any], place: str) -> Any:
    """The value at a place; None for a null, an empty object and one that is not there. Raises UnsupportedModel."""
    inside, _, name = place.rpartition(".")
    holder = config.get(inside) if inside else config
    if holder is None:
        return None
    value = holder.get(name)
    if name in ("rope_scaling", "rope_parameters") and value is not None and not isinstance(value, dict):
        raise UnsupportedModel(f"config.json: {name} is {shorten(repr(value))}: an object is expected")
    return None if value == {} else value


def _plain(value: Any) -> Any:
    """Numbers that transformers writes as {"__float__": "NaN"}, as numbers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("NaN", "Infinity", "-Infinity"):
            return float(value["__float__"])
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
