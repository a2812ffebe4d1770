"""Converts a Llama in safetensors, and an adapter for it, to llama.cpp's files. Runs in llama.cpp's environment.

    python -m bench.llama_files model MODEL_DIR BF16 Q8_0 Q4_0
    python -m bench.llama_files adapter MODEL_DIR ADAPTER_DIR FILE

The files contain no vocabulary, because benches use token ids.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_bf16(model_dir: Path, path: Path) -> None:
    """Write the checkpoint's bf16 values unchanged, and norms in fp32."""
    import gguf
    import numpy as np

    config = json.loads((model_dir / "config.json").read_text())
    heads, kv_heads, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    for name, bits in tensors_of(model_dir / "model.safetensors"):
        if bits.ndim == 1:
            writer.add_tensor(llama_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            bits = interleaved(bits, heads if name.endswith("q_proj.weight") else kv_heads)
        writer.add_tensor(llama_name(name), np.ascontiguousarray(bits).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_adapter(model_dir: Path, adapter_dir: Path, path: Path) -> None:
    """Write a PEFT adapter's bf16 values unchanged."""
    import gguf
    import numpy as np

    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(json.loads((adapter_dir / "adapter_config.json").read_text())["lora_alpha"]))
    for name, bits in tensors_of(adapter_dir / "adapter_model.safetensors"):
        stem, _, half = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(stem.rpartition(".")[2])
        if half == "lora_B" and heads:
            bits = interleaved(bits, heads)
        found = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(f"{llama_name(stem)}.{half.lower()}", found, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(path: Path) -> Any:
    """(name, bits of bf16) of a safetensors file, mapped."""
    import numpy as np

    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, about in header.items():
        if about["dtype"] != "BF16":
            raise ValueError(f"{name} is {about['dtype']}: BF16 is expected")
        start = 8 + size + about["data_offsets"][0]
        yield name, np.memmap(path, np.uint16, "r", start, tuple(about["shape"]))


def llama_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[rest]}.weight"


def interleaved(weight: Any, heads: int) -> Any:
    """The rows of each head in the order in which llama.cpp rotates them: neighbours instead of halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def quantize(source: Path, path: Path, ftype: int) -> None:
    """Quantize a file with llama.cpp's own quantizer."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = ftype
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp did not write {path}")


def main() -> None:
    """Make the files. Each appears when it is complete."""
    what, model_dir, *others = sys.argv[1], *map(Path, sys.argv[2:])
    if what == "adapter":
        adapter_dir, path = others
        _whole(path, lambda part: write_adapter(model_dir, adapter_dir, part))
        return
    import llama_cpp

    bf16, q8_0, q4_0 = others
    llama_cpp.llama_backend_init()
    _whole(bf16, lambda part: write_bf16(model_dir, part))
    _whole(q8_0, lambda part: quantize(bf16, part, llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0))
    _whole(q4_0, lambda part: quantize(bf16, part, llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0))


def _whole(path: Path, write: Callable[[Path], None]) -> None:
    if not path.exists():
        part = path.with_suffix(".part")
        write(part)
        part.replace(path)


if __name__ == "__main__":
    main()
