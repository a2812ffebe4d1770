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
from motet.kernels.triton.scatter import BLOCK as SCATTER_BLOCK
from motet.kernels.triton.scatter import WARPS as SCATTER_WARPS
from motet.kernels.triton.scatter import scatter_kernel

POINTERS = {
    "x": "*bf16", "y": "*bf16", "arena": "*bf16", "h": "*fp32", "rows": "*i32", "groups": "*i32", "segments": "*i32",
    "item_segment": "*i32", "item_pages": "*i64", "scales": "*fp32", "header": "*i32", "counters": "*i32",
    "q": "*bf16", "out": "*bf16", "kv": "*bf16", "count": "*i32", "tiles": "*i32", "tables": "*i32", "scale": "fp32",
    "pieces": "*i64", "source": "*i64", "target": "*i64",
}  # fmt: skip
UNALIGNED = ("scale",)
ALIGNED = tuple(
    {*POINTERS, "x_stride", "y_stride", "q_stride", "K", "N0", "N1", "N2"}.difference(UNALIGNED)
)  # what the launch finds to be multiples of 16


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


def resources(kernel: Any, constants: dict[str, Any], warps: int, stages: int) -> dict[str, Any]:
    """Registers and local memory of the machine code, shared memory, and how global memory is read."""
    names, pointers = kernel.arg_names, POINTERS
    if constants.get("UPCAST"):
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
        "stores_16": len(re.findall(r"st\.global[.\w:]*\.v4\.b32|st\.global[.\w:]*\.v2\.b64", ptx)),
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
    for kind, unit in (("bf16", 2), ("fp32", 4)):
        found[f"scatter, {kind}"] = resources(scatter_kernel, {"UNIT": unit, "BLOCK": SCATTER_BLOCK}, SCATTER_WARPS, 1)
    print(json.dumps(found, indent=2))
