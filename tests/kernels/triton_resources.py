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

from motet.kernels.triton.attention import CONTEXT, CONTEXT_FP32, ROWS, ROWS_FP32, STAGES, WARPS
from motet.kernels.triton.attention_kernel import paged_attention
from motet.kernels.triton.device import lora_expand, lora_shrink, lora_ticketed
from motet.kernels.triton.lora import TICKETED, TILES
from motet.kernels.triton.pointwise import COLUMNS, COLUMNS_WARPS, GROUP, head_launch, norm_launch
from motet.kernels.triton.pointwise_kernels import add_norm, rotate_and_store, silu_mul

POINTERS = {
    "x": "*bf16", "y": "*bf16", "arena": "*bf16", "h": "*fp32", "rows": "*i32", "groups": "*i32", "segments": "*i32",
    "item_segment": "*i32", "item_pages": "*i64", "scales": "*fp32", "header": "*i32", "counters": "*i32",
    "q": "*bf16", "out": "*bf16", "kv": "*bf16", "count": "*i32", "tiles": "*i32", "tables": "*i32", "scale": "fp32",
    "values": "*bf16", "adapted": "*i32", "weight": "*bf16", "qkv": "*bf16", "cos": "*bf16", "sin": "*bf16",
    "qk_norm": "*bf16", "kv_slots": "*i64", "gate_up": "*bf16", "eps": "fp32",
}  # fmt: skip
UNALIGNED = ("scale", "eps", "adapted", "kv_slots")
ALIGNED = tuple(
    {*POINTERS, "x_stride", "y_stride", "q_stride", "K", "N0", "N1", "N2"}.difference(UNALIGNED)
)  # what the launch finds to be multiples of 16

BETWEEN_PRODUCTS = {"8B": (4096, 32, 128, 14336), "ragged": (3000, 28, 96, 8190), "largest": (16384, 128, 256, 53248)}


def configurations(*, ragged: bool, upcast: bool = False) -> dict[str, tuple[Any, dict[str, Any], int, int]]:
    """{name: (kernel, constants, warps, stages)} of everything that serving launches, for the qkv group.

    `ragged` ones make no promise about sizes; `upcast` ones are for pools of fp32.
    """
    common = {"S": 3, "ALIGN": 1 if ragged else 16, "UPCAST": upcast}
    found: dict[str, tuple[Any, dict[str, Any], int, int]] = {}
    for (rows, half), launch in TILES.items():
        constants = {**common, "M": rows, "R": rows}
        if half == "shrink":
            constants |= {"BK": launch.block, "WHOLE_K": not ragged}
        else:
            constants |= {"BN": launch.block, "UNROLL": launch.unroll, "WHOLE_N": not ragged}
        kernel = lora_shrink if half == "shrink" else lora_expand
        found[f"{half} {rows} rows"] = (kernel, constants, launch.warps, launch.stages)
    constants = {**common, "M": 16, "R": 16, "BK": TICKETED.block, "BN": TICKETED.block, "UNROLL": TICKETED.unroll}
    found["ticketed 16 rows"] = (
        lora_ticketed,
        {**constants, "WHOLE_K": not ragged, "WHOLE_N": not ragged},
        TICKETED.warps,
        TICKETED.stages,
    )
    return found


def attention(rows: int, context: int, *, upcast: bool) -> tuple[Any, dict[str, Any], int, int]:
    """Paged attention of Llama 8B with tiles of `rows` and steps of `context`."""
    constants = {"HEADS": 32, "KV_HEADS": 8, "G": 4, "D": 128, "DP": 128, "BLOCK": 16, "BM": rows, "BN": context}
    return paged_attention, {**constants, "UPCAST": upcast}, WARPS, STAGES


def between_products(hidden: int, heads: int, head_dim: int, mlp: int) -> dict[str, tuple[Any, dict[str, Any], int, int]]:
    """The same of the operations between products, with 8 KV heads: without anything optional, and with all of it."""
    nothing = {"values": None, "adapted": None}
    block, warps = norm_launch(hidden)
    add = {"HIDDEN": hidden, "BLOCK": block}
    half, head_warps = head_launch(head_dim)
    rotate = {"HEADS": heads, "KV_HEADS": 8, "D": head_dim, "GROUP": GROUP, "HALF": half}
    silu = {"MLP": mlp, "BLOCK": COLUMNS}
    return {
        "norm": (add_norm, {**add, **nothing, "y": None}, warps, STAGES),
        "add_norm": (add_norm, {**add, **nothing}, warps, STAGES),
        "add_norm, delta": (add_norm, add, warps, STAGES),
        "rotate_and_store": (rotate_and_store, {**rotate, **nothing, "qk_norm": None}, head_warps, STAGES),
        "rotate_and_store, delta": (rotate_and_store, rotate, head_warps, STAGES),
        "silu_mul": (silu_mul, {**silu, **nothing}, COLUMNS_WARPS, STAGES),
        "silu_mul, delta": (silu_mul, silu, COLUMNS_WARPS, STAGES),
    }


def resources(kernel: Any, constants: dict[str, Any], warps: int, stages: int, *, fp32: bool = False) -> dict[str, Any]:
    """Registers and local memory of the machine code, shared memory, and how global memory is read."""
    names, pointers = kernel.arg_names, POINTERS
    if fp32 or constants.get("UPCAST"):
        pointers = {name: kind.replace("bf16", "fp32") for name, kind in POINTERS.items()}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name in ALIGNED}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
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
        "copies_16": len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*, 0x10|cp\.async\.cg\.shared\.global[^;]*, 16", ptx)),
        "copies_narrow": len(re.findall(r"cp\.async\.ca\.", ptx)),
        "loads_16": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64", ptx)),
        "loads_16_bits": len(re.findall(r"ld\.global[.\w:]*\.b16", ptx)),
        "stores_16": len(re.findall(r"st\.global[.\w:]*\.v4\.b32", ptx)),
        "stores_16_bits": len(re.findall(r"st\.global[.\w:]*\.b16", ptx)),
    }


if __name__ == "__main__":
    found = {name: resources(*configuration) for name, configuration in configurations(ragged=False).items()}
    found |= {f"{name}, ragged": resources(*configuration) for name, configuration in configurations(ragged=True).items()}
    in_fp32 = configurations(ragged=False, upcast=True)
    found |= {f"{name}, fp32": resources(*configuration) for name, configuration in in_fp32.items()}
    for kind, rows in ROWS.items():
        found[f"attention, {kind}"] = resources(*attention(rows, CONTEXT, upcast=False))
    found["attention, fp32"] = resources(*attention(ROWS_FP32, CONTEXT_FP32, upcast=True))
    for kind, shapes in BETWEEN_PRODUCTS.items():
        for name, configuration in between_products(*shapes).items():
            found[f"{name}, {kind}"] = resources(*configuration)
            found[f"{name}, {kind}, fp32"] = resources(*configuration, fp32=True)
    print(json.dumps(found, indent=2))
