"""Promise: checkpoints of GPTQ, AWQ and compressed-tensors compute their own values; unknown fields are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from motet.cli.main import cli
from motet.services.worker.engines.model_config import parse_model_config
from motet.services.worker.engines.quantization_config import parse_quantization
from motet.shared.hf_config import UnsupportedModel
from tests.services.worker.test_quantization import LinearOfRoundedRows, distances
from tests.support_integers import to_8_bits
from tests.support_models import AdapterFixture, Sequence, drive, make_adapters, make_checkpoint, make_runner, random_prompts
from tests.support_quantized import LAYOUTS, Layout, quantize_checkpoint

MODEL = "llama-linear-biased"  # shards, biases, a matrix to the vocabulary of its own


@dataclass
class Base:
    model_dir: Path
    adapters: list[AdapterFixture]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    directory = tmp_path_factory.mktemp("base")
    model_dir = make_checkpoint(MODEL, directory)
    return Base(model_dir, make_adapters(model_dir, directory)[2:4])


def sequences() -> list[Sequence]:
    return [Sequence(prompt, i % 3 - 1, 1) for i, prompt in enumerate(random_prompts(6, seed=5, longest=24))]


def floats_checkpoint(config: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path) -> Path:
    """The same model with floats for the quantized weights. The matrix to the vocabulary is rounded as the worker does it."""
    tensors = {name: value.float() for name, value in tensors.items()}
    tensors["lm_head.weight"] = to_8_bits(tensors["lm_head.weight"]).float()
    path.mkdir()
    save_file(tensors, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps({key: v for key, v in config.items() if key != "quantization_config"}))
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_checkpoint_says_what_its_floats_say(
    base: Base, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = quantize_checkpoint(base.model_dir, tmp_path / "whole", LAYOUTS[layout])
    floats = floats_checkpoint(config, tensors, tmp_path / "floats")
    got, want, widened = sequences(), sequences(), sequences()
    drive(make_runner(tmp_path / "whole", base.adapters, kernels="cpu"), got, chunk=16)
    monkeypatch.setattr(import_module("motet.services.worker.native.backends.reference"), "Linear", LinearOfRoundedRows)
    drive(make_runner(floats, base.adapters, kernels="reference"), want, chunk=16)
    assert median(distances(got, want)) < 1e-5, "most are the same"
    assert max(distances(got, want)) < 0.03, "another order of sums rounds some activations to a neighbour"
    drive(make_runner(tmp_path / "whole", base.adapters, kernels="reference"), widened, chunk=16)
    assert max(distances(widened, want)) < 0.03, "the reference reads them too, as floats"


def quantized(base: Base, path: Path, layout: str) -> dict[str, torch.Tensor]:
    quantize_checkpoint(base.model_dir, path, LAYOUTS[layout])
    return load_file(path / "model.safetensors")


def test_inputs_out_of_the_order_of_their_groups_are_refused(base: Base, tmp_path: Path) -> None:
    tensors = quantized(base, tmp_path / "model", "gptq-4-groups")
    name = "model.layers.1.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.down_proj\.g_idx: inputs are not in the order"):
        make_runner(tmp_path / "model", [], kernels="cpu")


def test_reordered_inputs_need_their_groups(base: Base, tmp_path: Path) -> None:
    quantized(base, tmp_path / "model", "packed-4-groups")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"lacks 21 of .*weight_g_idx"):
        make_runner(tmp_path / "model", [], kernels="cpu")


def test_biases_of_zero_from_old_gptq_programs_are_ignored_and_others_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("mistral", tmp_path)
    quantize_checkpoint(model_dir, tmp_path / "model", LAYOUTS["gptq-4-groups"])
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    make_runner(tmp_path / "model", [], kernels="cpu")
    tensors["model.layers.0.self_attn.o_proj.bias"][3] = 1.0
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.self_attn\.o_proj\.bias is not zero"):
        make_runner(tmp_path / "model", [], kernels="cpu")


@pytest.mark.parametrize(
    ("layout", "name", "spoil", "message"),
    [
        ("awq", "model.layers.0.mlp.up_proj.qweight", lambda t: t[:, :-1], r"up_proj\.qweight has shape \[64, 11\]"),
        ("awq", "model.layers.0.mlp.up_proj.qweight", lambda t: t.short(), r"up_proj\.qweight is stored as I16"),
        (
            "awq",
            "model.layers.2.mlp.up_proj.scales",
            lambda t: t * torch.inf,
            r"layers\.2\.mlp\.up_proj has scales that are not",
        ),
        ("packed-4-groups", "model.layers.0.mlp.up_proj.weight_shape", lambda t: t.flip(0), r"weight_shape is \[64, 96\]"),
        ("int8-w8a8", "model.layers.0.mlp.up_proj.weight_scale", None, r"lacks 1 of .*up_proj\.weight_scale"),
    ],
)
def test_tensors_that_contradict_the_quantization_are_refused(
    base: Base, tmp_path: Path, layout: str, name: str, spoil: Callable[[torch.Tensor], torch.Tensor] | None, message: str
) -> None:
    tensors = quantized(base, tmp_path / "model", layout)
    if spoil is None:
        del tensors[name]
    else:
        tensors[name] = spoil(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        make_runner(tmp_path / "model", [], kernels="cpu")


def test_modules_that_the_config_keeps_are_read_as_floats(base: Base, tmp_path: Path) -> None:
    tensors = quantized(base, tmp_path / "model", "packed-4-groups")
    floats = {name: t for path in base.model_dir.glob("*.safetensors") for name, t in load_file(path).items()}
    module = "model.layers.1.mlp.down_proj"
    tensors = {name: t for name, t in tensors.items() if not name.startswith(f"{module}.weight")}
    save_file(tensors | {f"{module}.weight": floats[f"{module}.weight"]}, tmp_path / "model" / "model.safetensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", r"re:.*layers\.1\.mlp\.down_proj"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    runner = make_runner(tmp_path / "model", [], kernels="cpu")
    got = sequences()[:1]
    drive(runner, got, chunk=64)
    assert got[0].logits[-1].isfinite().all()


def test_an_option_that_contradicts_the_checkpoint_is_refused(base: Base, tmp_path: Path) -> None:
    quantized(base, tmp_path / "model", "awq")
    with pytest.raises(UnsupportedModel, match="the checkpoint is int4: it cannot be served with --quantization int8"):
        make_runner(tmp_path / "model", [], kernels="cpu", quantization="int8")
    make_runner(tmp_path / "model", [], kernels="cpu", quantization="int4")


def with_changes(layout: Layout, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    config = deepcopy(layout.config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return {"quantization_config": config}


GROUP = ("config_groups", "group_0")


@pytest.mark.parametrize(
    ("layout", "path", "value"),
    [
        ("gptq-4-groups", ("quant_method",), "hqq"),
        ("gptq-4-groups", ("bits",), 3),
        ("gptq-4-groups", ("bits",), 4.0),
        ("gptq-4-groups", ("group_size",), 16),
        ("gptq-4-groups", ("sym",), "yes"),
        ("gptq-4-groups", ("lm_head",), True),
        ("gptq-4-groups", ("checkpoint_format",), "marlin"),
        ("gptq-4-groups", ("dynamic",), {"-:.*": {}}),
        ("gptq-4-groups", ("surprise",), 1),
        ("gptq-4-groups", ("desc_act",), None),
        ("awq", ("version",), "gemv"),
        ("awq", ("bits",), 8),
        ("awq", ("modules_to_not_convert",), "lm_head"),
        ("packed-4-groups", ("format",), ["pack-quantized"]),
        ("packed-4-groups", ("config_groups",), None),
        ("packed-4-groups", ("format",), "marlin-24"),
        ("packed-4-groups", ("kv_cache_scheme",), {"num_bits": 8}),
        ("packed-4-groups", ("ignore",), ["re:("]),
        ("packed-4-groups", ("config_groups", "group_1"), {}),
        ("packed-4-groups", (*GROUP, "targets"), ["re:.*down_proj"]),
        ("packed-4-groups", (*GROUP, "weights", "type"), "float"),
        ("packed-4-groups", (*GROUP, "weights", "strategy"), "block"),
        ("packed-4-groups", (*GROUP, "weights", "num_bits"), 2),
        ("packed-4-groups", (*GROUP, "weights", "surprise"), 1),
        ("packed-4-groups", (*GROUP, "weights", "actorder"), True),
        ("int8-w8a8", (*GROUP, "input_activations", "dynamic"), False),
        ("int8-w8a8", (*GROUP, "input_activations", "num_bits"), 4),
        ("int8-w8a8", (*GROUP, "output_activations"), {"num_bits": 8}),
    ],
)
def test_a_field_that_is_not_computed_is_refused_by_name(layout: str, path: tuple[str, ...], value: Any) -> None:
    assert parse_quantization({"quantization_config": LAYOUTS[layout].config}) is not None
    name = "config_groups" if path[-1] == "group_1" else path[-1]
    with pytest.raises(UnsupportedModel, match=rf"quantization_config\.(config_groups\.group_0\.)?(\w+\.)?{name} "):
        parse_quantization(with_changes(LAYOUTS[layout], path, value))


def test_a_quantized_matrix_to_the_vocabulary_is_refused(base: Base, tmp_path: Path) -> None:
    quantized(base, tmp_path / "model", "int8-w8a8")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    assert parse_model_config(config).quantization is not None
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="lacks lm_head"):
        make_runner(tmp_path / "model", [], kernels="cpu")


@pytest.mark.parametrize("bits", [8, 4])
def test_motet_quantize_writes_what_a_worker_rounds_at_its_start(base: Base, tmp_path: Path, bits: int) -> None:
    (base.model_dir / "tokenizer.json").write_text("{}")
    (base.model_dir / "additional_chat_templates").mkdir(exist_ok=True)
    (base.model_dir / "additional_chat_templates/tool_use.jinja").write_text("t")
    out = tmp_path / "out"
    done = CliRunner().invoke(cli, ["quantize", str(base.model_dir), str(out), "--bits", str(bits)])
    assert done.exit_code == 0, done.output
    assert f"{out}: " in done.stdout
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "additional_chat_templates/tool_use.jinja").read_text() == "t"
    assert len(list(out.glob("*.safetensors"))) == len(list(base.model_dir.glob("*.safetensors"))) > 1
    got, want = sequences(), sequences()
    drive(make_runner(out, base.adapters, kernels="cpu"), got, chunk=16)
    drive(make_runner(base.model_dir, base.adapters, kernels="cpu", quantization=f"int{bits}"), want, chunk=16)
    assert max(distances(got, want)) == 0.0, "the same bits"
    again = CliRunner().invoke(cli, ["quantize", str(out), str(tmp_path / "twice")])
    assert again.exit_code != 0
    assert f"is int{bits} already" in again.output
    taken = CliRunner().invoke(cli, ["quantize", str(base.model_dir), str(out)])
    assert taken.exit_code != 0
    assert "exists already" in taken.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "nothing half made stays"
