"""Cross-compiles the Triton kernels for sm_90, no GPU needed, and prints what every configuration uses, as JSON.

A program of its own, not interpreted: `python -m tests.kernels.triton_resources`. Shapes are those of Llama 8B.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from motet.kernels.triton import sampling_kernels
from motet.kernels.triton.attention import LAUNCHES, SPLITTING
from motet.kernels.triton.attention_kernel import paged_attention
from motet.kernels.triton.device import lora_expand, lora_shrink
from motet.kernels.triton.lora import FUSED, LARGE, MOST_SPLITS, PREFILL, SMALL, Launch, registers_of
from motet.kernels.triton.pointwise import COLUMNS, COLUMNS_WARPS, GROUP, head_launch, norm_launch
from motet.kernels.triton.pointwise_kernels import add_norm, rotate_and_store, silu_mul
from motet.kernels.triton.sampling import CHUNK, ROOM, TILE, WARPS

POINTERS = {
    "x": "*bf16", "y": "*bf16", "arena": "*bf16", "h": "*fp32", "rows": "*i32",
    "items": "*i32", "pages": "*i64", "scales": "*fp32",
    "q": "*bf16", "out": "*bf16", "kv": "*bf16", "tiles": "*i32", "tables": "*i32", "scale": "fp32",
    "parts": "*fp32", "sums": "*fp32", "arrived": "*i32",
    "values": "*bf16", "adapted": "*i32", "weight": "*bf16", "qkv": "*bf16", "cos": "*bf16", "sin": "*bf16",
    "qk_norm": "*bf16", "kv_slots": "*i64", "gate_up": "*bf16", "eps": "fp32",
    "logits": "*fp32", "rules": "*fp64", "peaks": "*i64", "means": "*fp32", "pivots": "*i32", "table": "*fp32",
    "gathered": "*i32", "found": "*i32", "cuts": "*i32", "noise": "*fp64",
}  # fmt: skip
LORA = {"decode, few rows": SMALL, "decode": LARGE, "prefill": PREFILL}
SAMPLING = [getattr(sampling_kernels, name) for name in WARPS]
Configuration = tuple[Any, dict[str, Any], dict[str, Any]]
UNALIGNED = ("scale", "eps", "adapted", "kv_slots")
ALIGNED = tuple(
    {*POINTERS, "x_stride", "y_stride", "q_stride", "h_row", "h_plane", "span", "ranks", "K", "N0", "N1", "N2"} - {*UNALIGNED}
)  # what the launch finds to be multiples of 16

BETWEEN_PRODUCTS = {"8B": (4096, 32, 128, 14336), "ragged": (3000, 28, 96, 8190), "largest": (16384, 128, 256, 53248)}


def configurations(*, ragged: bool, upcast: bool = False) -> dict[str, Configuration]:
    """{name: (kernel, constants, options)} of everything that serving launches, for the qkv group.

    `ragged` ones make no promise about sizes; `upcast` ones are for pools of fp32.
    """
    common = {"ALIGN": 1 if ragged else 16, "EARLY": True, "UPCAST": upcast}
    found: dict[str, Configuration] = {}

    def lora_options(launch: Launch) -> dict[str, Any]:
        registers = registers_of(launch, ragged=ragged, upcast=upcast)
        return {**_options(launch), "enable_fp_fusion": FUSED, "maxnreg": registers}

    for name, constants in LORA.items():
        tile, shrink, expand = constants.tile, constants.shrink, constants.expand
        both = {**common, "M": tile.rows, "FEW": tile.few, "FEW_R": tile.few_ranks}
        of_shrink = {"R": tile.ranks, "BK": shrink.block, "WIDE": shrink.wide, "WHOLE_K": not ragged}
        found[f"shrink, {name}"] = (lora_shrink, {**both, **of_shrink}, lora_options(shrink))
        of_expand = {"SOME": tile.some, "R": expand.ranks, "BN": tile.columns, "WIDE": tile.wide, "WHOLE_N": not ragged}
        of_expand |= {"PLANES": MOST_SPLITS if tile.few else 1, "ADD": name == "prefill"}
        found[f"expand, {name}"] = (lora_expand, {**both, **of_expand}, lora_options(expand))
    return found


def attention(kind: str, *, divided: bool) -> Configuration:
    """Paged attention of Llama 8B, with contexts in several shares if they are `divided`."""
    launch = LAUNCHES[kind]
    constants = {"HEADS": 32, "KV_HEADS": 8, "G": 4, "D": 128, "DP": 128, "BLOCK": 16, "BM": launch.rows, "BN": launch.context}
    constants |= {"LEAST": SPLITTING.least if divided else 0, "CHUNK": launch.joined // (4 * 128), "UPCAST": kind == "fp32"}
    return paged_attention, constants, _options(launch)


def _options(launch: Any) -> dict[str, Any]:
    return {"num_warps": launch.warps, "num_stages": launch.stages}


def between_products(hidden: int, heads: int, head_dim: int, mlp: int) -> dict[str, Configuration]:
    """The same of the operations between products, with 8 KV heads: without anything optional, and with all of it."""
    nothing = {"values": None, "adapted": None}
    block, warps = norm_launch(hidden)
    add = {"HIDDEN": hidden, "BLOCK": block}
    half, head_warps = head_launch(head_dim)
    rotate = {"HEADS": heads, "KV_HEADS": 8, "D": head_dim, "GROUP": GROUP, "HALF": half}
    silu = {"MLP": mlp, "BLOCK": COLUMNS}
    return {
        "norm": (add_norm, {**add, **nothing, "y": None}, {"num_warps": warps}),
        "add_norm": (add_norm, {**add, **nothing}, {"num_warps": warps}),
        "add_norm, delta": (add_norm, add, {"num_warps": warps}),
        "rotate_and_store": (rotate_and_store, {**rotate, **nothing, "qk_norm": None}, {"num_warps": head_warps}),
        "rotate_and_store, delta": (rotate_and_store, rotate, {"num_warps": head_warps}),
        "silu_mul": (silu_mul, {**silu, **nothing}, {"num_warps": COLUMNS_WARPS}),
        "silu_mul, delta": (silu_mul, silu, {"num_warps": COLUMNS_WARPS}),
    }


def sampling(vocab_size: int) -> dict[str, Configuration]:
    """The same of drawing tokens."""
    tiles = triton.cdiv(vocab_size, TILE)
    sizes = {"VOCAB": vocab_size, "TILES": tiles, "PADDED": triton.next_power_of_2(tiles)}
    sizes |= {"TILE": TILE, "CHUNK": CHUNK, "ROOM": ROOM}
    found: dict[str, Configuration] = {}
    for name, kernel in zip(WARPS, SAMPLING, strict=True):
        found[name] = kernel, {key: size for key, size in sizes.items() if key in kernel.arg_names}, {"num_warps": WARPS[name]}
    return found


def resources(kernel: Any, constants: dict[str, Any], options: dict[str, Any], *, fp32: bool = False) -> dict[str, Any]:
    """Registers and local memory of the machine code, shared memory, how global memory is read, and what is summed up."""
    names, pointers = kernel.arg_names, POINTERS
    if fp32 or constants.get("UPCAST"):
        pointers = {name: kind.replace("bf16", "fp32") for name, kind in POINTERS.items()}
    if kernel in SAMPLING:
        pointers = {**pointers, "sums": "*i64", "out": "*i32"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in ALIGNED}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.findall(r"REG:(\d+)", used)[0]),
        "local_bytes": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", used))),  # spills, if any
        "shared_bytes": built.metadata.shared,
        "products": len(re.findall(r"wgmma\.mma|mma\.sync", ptx)),
        "wide_products": len(re.findall(r"wgmma\.mma", ptx)),
        "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),  # products whose sum with another number is rounded once
        "copies_16": len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*, 0x10|cp\.async\.cg\.shared\.global[^;]*, 16", ptx)),
        "copies_narrow": len(re.findall(r"cp\.async\.ca\.", ptx)),
        "loads_16": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64", ptx)),
        "loads_16_bits": len(re.findall(r"ld\.global[.\w:]*\.b16", ptx)),
        "stores_16": len(re.findall(r"st\.global[.\w:]*\.v4\.b32|st\.global[.\w:]*\.v2\.b64", ptx)),
        "stores_16_bits": len(re.findall(r"st\.global[.\w:]*\.b16", ptx)),
        "summed": re.findall(r"\}\) : \(tensor<([\dx]*)xf32>\)", built.asm["ttir"]),  # shapes
    }


if __name__ == "__main__":
    found = {name: resources(*configuration) for name, configuration in configurations(ragged=False).items()}
    found |= {f"{name}, ragged": resources(*configuration) for name, configuration in configurations(ragged=True).items()}
    in_fp32 = configurations(ragged=False, upcast=True)
    found |= {f"{name}, fp32": resources(*configuration) for name, configuration in in_fp32.items()}
    found |= {f"attention, {kind}": resources(*attention(kind, divided=False)) for kind in LAUNCHES}
    found |= {f"attention, {kind}, divided": resources(*attention(kind, divided=True)) for kind in ("decode", "fp32")}
    for kind, shapes in BETWEEN_PRODUCTS.items():
        for name, configuration in between_products(*shapes).items():
            found[f"{name}, {kind}"] = resources(*configuration)
            found[f"{name}, {kind}, fp32"] = resources(*configuration, fp32=True)
    for vocab_size in (128256, 49155):
        for name, configuration in sampling(vocab_size).items():
            found[f"{name}, {vocab_size}"] = resources(*configuration)
    print(json.dumps(found, indent=2))
