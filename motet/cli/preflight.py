"""Checks a base model's files before any service starts, in well under a second: without torch, and no weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from motet.services.worker.engines.model_config import quantization_of, read_model_config
from motet.services.worker.engines.safetensors_files import files_of, opened
from motet.services.worker.native.checkpoint import check_files
from motet.shared.base_shapes import read_shapes
from motet.shared.config import ConfigError
from motet.shared.generation_config import generation_defaults, notes, read_generation_config
from motet.shared.hf_config import LENGTH_MAX, UnsupportedModel, read_config, size_in


def preflight(
    model_dir: Path,
    *,
    engine: str = "native",
    load_format: Literal["auto", "dummy"] = "auto",
    quantization: str = "none",
) -> list[str]:
    """Check config.json, generation_config.json, the tokenizer's file and the headers of the safetensors files.

    For other engines than the native one only what gateway and registry read is checked, and that safetensors files are
    readable: vLLM knows more architectures and formats. Returns notes for people, such as two spellings of a field that
    disagree. Raises ConfigError with the file, the field or tensor, and the reason, in one line. The arguments are options of
    `motet worker`.
    """
    try:
        size_in(read_config(model_dir), "max_position_embeddings", most=LENGTH_MAX)
        read_shapes(model_dir)
        generation_defaults(read_generation_config(model_dir))
        if not (model_dir / "tokenizer.json").is_file():
            raise UnsupportedModel(f"{model_dir} has no tokenizer.json (convert the tokenizer to the fast format first)")
        if engine == "native":
            model = read_model_config(model_dir)
            quantization_of(quantization, model)
            if load_format == "auto":
                check_files(model_dir, model)
        else:
            _check_readable(model_dir)
        return notes(model_dir)
    except UnsupportedModel as error:
        raise ConfigError(f"--model: {error}") from None


def _check_readable(model_dir: Path) -> None:
    """Raise UnsupportedModel if the checkpoint is in safetensors files and one of them is damaged."""
    if any(model_dir.glob("*.safetensors")):
        for path in files_of(model_dir):
            with opened(path, framework="np"):
                pass
