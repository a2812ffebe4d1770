"""The Triton kernels compiled for sm_90: no spills, few enough registers for the programs that share a multiprocessor, and
16-byte reads. The interpreter accepts code that the compiler rejects, so this test runs on machines without a GPU, too.

It uses the pinned Triton and every other version that `make triton-other` has unpacked, because PyTorch has its own on a
GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from motet.kernels.triton.attention import LAUNCHES as ATTENTION
from motet.kernels.triton.attention import SPLITTING
from motet.kernels.triton.sampling import TILE
from motet.kernels.triton.sampling import WARPS as SAMPLING
from tests.kernels.triton_resources import LORA

ROOT = Path(__file__).parents[2]
LAUNCHES = {f"shrink, {name}": constants.shrink for name, constants in LORA.items()}
LAUNCHES |= {f"expand, {name}": constants.expand for name, constants in LORA.items()}
REGISTERS_PER_MULTIPROCESSOR = 65536
SHARED_BYTES_PER_MULTIPROCESSOR = 227 << 10
OTHERS = sorted((ROOT / "build").glob("triton-*"))


@pytest.fixture(scope="module", params=[None, *OTHERS], ids=lambda other: other.name if other else "pinned")
def other(request: pytest.FixtureRequest) -> Path | None:
    found: Path | None = request.param
    return found


def output_of(program: str, other: Path | None) -> dict[str, dict[str, Any]]:
    """What a program of tests/kernels prints with another Triton, or with the pinned one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if other is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(other), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", f"tests.kernels.{program}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def compiled(other: Path | None) -> dict[str, dict[str, Any]]:
    return output_of("triton_resources", other)


def test_launches_without_triton_are_those_of_triton(other: Path | None) -> None:
    found = output_of("triton_launches", other)
    assert not found["random"]["different"]
    assert found["random"]["direct"] > found["random"]["launches"] / 2
    assert found["lora"] == {"launches": 2 * 5 * 2 * 4, "seen": 0}, "two steps, five layers, shrink and expand of four groups"
    assert found["draws"]["launches"] == 3 * len(SAMPLING) and found["draws"]["seen"] == 0


@pytest.mark.parametrize("name", LAUNCHES)
def test_nothing_spills_and_several_programs_fit(compiled: dict[str, dict[str, Any]], name: str) -> None:
    used, launch, programs = compiled[name], LAUNCHES[name], 4 if "decode" in name else 2
    assert used["local_bytes"] == 0
    assert used["registers"] * 32 * launch.warps * programs <= REGISTERS_PER_MULTIPROCESSOR
    assert used["shared_bytes"] * programs <= SHARED_BYTES_PER_MULTIPROCESSOR


@pytest.mark.parametrize("name", LAUNCHES)
def test_weights_and_activations_move_in_pieces_of_16_bytes(compiled: dict[str, dict[str, Any]], name: str) -> None:
    used = compiled[name]
    assert used["copies_16"] + used["loads_16"] > 0
    assert used["loads_16_bits"] == used["stores_16_bits"] == 0
    if "shrink" not in name:
        assert used["stores_16"] > 0


@pytest.mark.parametrize("name", LAUNCHES)
def test_tensor_cores_multiply_and_large_tiles_in_warp_groups(compiled: dict[str, dict[str, Any]], name: str) -> None:
    assert compiled[name]["products"] > 0
    assert (compiled[name]["wide_products"] > 0) == ("prefill" in name)


def test_small_and_large_decode_steps_sum_in_an_order_that_their_threads_do_not_change(
    compiled: dict[str, dict[str, Any]],
) -> None:
    small, large = (compiled[f"expand, {name}"]["summed"] for name in ("decode, few rows", "decode"))
    *planes, ranks = small
    assert planes == large[:-1] == ["2x8x16", "2x4x16", "2x2x16", "2x1x16"], "two numbers at a time, in any order"
    assert ranks == f"8x{LORA['decode, few rows'].tile.wide}" and large[-1] == f"8x{LORA['decode'].tile.wide}"
    for constants in (LORA["decode, few rows"], LORA["decode"]):  # a thread has 8 columns, and so all ranks of them
        assert constants.tile.wide == 8 * 32 * constants.expand.warps
    assert compiled["shrink, decode, few rows"]["summed"] == compiled["shrink, decode"]["summed"]


@pytest.mark.parametrize("name", LAUNCHES)
def test_products_are_fused_with_sums_only_where_the_kernel_says_so(compiled: dict[str, dict[str, Any]], name: str) -> None:
    """Elsewhere the compiler would choose which of two products is rounded, and choose otherwise for steps of another size."""
    launch, tile = LAUNCHES[name], LORA[name.split(", ", 1)[1]].tile
    weights = tile.few_ranks * (launch.wide if "shrink" in name else tile.wide)
    assert compiled[name]["fused"] == weights // 2 // (32 * launch.warps), "of every two of a thread's products one"


@pytest.mark.parametrize("name", [*ATTENTION, "decode, divided", "fp32, divided"])
def test_attention_does_not_spill_and_reads_in_pieces_of_16_bytes(compiled: dict[str, dict[str, Any]], name: str) -> None:
    used = compiled[f"attention, {name}"]
    assert used["local_bytes"] == 0
    assert used["copies_16"] + used["loads_16"] > 0 and used["loads_16_bits"] == 0
    assert used["products"] > 0 or name.startswith("fp32")


@pytest.mark.parametrize("name", ["decode", "decode, divided"])
def test_programs_that_divide_contexts_run_all_at_a_time(compiled: dict[str, dict[str, Any]], name: str) -> None:
    used, threads = compiled[f"attention, {name}"], 32 * ATTENTION["decode"].warps
    assert used["registers"] * threads * SPLITTING.programs <= REGISTERS_PER_MULTIPROCESSOR
    assert used["shared_bytes"] * SPLITTING.programs <= SHARED_BYTES_PER_MULTIPROCESSOR


@pytest.mark.parametrize("shapes", ["8B", "ragged", "largest"])
@pytest.mark.parametrize("name", ["norm", "add_norm", "rotate_and_store", "silu_mul"])
def test_operations_between_products_do_not_spill_and_move_16_bytes(
    compiled: dict[str, dict[str, Any]], name: str, shapes: str
) -> None:
    kinds = [kind for kind in compiled if kind.split(",")[0] == name and shapes in kind]
    assert kinds
    for kind in kinds:
        used = compiled[kind]
        assert used["local_bytes"] == 0
        if name != "silu_mul" or shapes != "ragged":  # its rows do not begin at multiples of 16 bytes
            assert used["loads_16"] > 0 and used["stores_16"] > 0
            assert used["loads_16_bits"] == used["stores_16_bits"] == 0


@pytest.mark.parametrize("vocab_size", [128256, 49155])
@pytest.mark.parametrize("name", SAMPLING)
def test_draws_do_not_spill_and_several_of_their_programs_fit(
    compiled: dict[str, dict[str, Any]], name: str, vocab_size: int
) -> None:
    used = compiled[f"{name}, {vocab_size}"]
    assert used["local_bytes"] == 0
    assert used["registers"] * 32 * SAMPLING[name] * 3 <= REGISTERS_PER_MULTIPROCESSOR
    if vocab_size % 4 == 0 and name != "select_key":
        assert used["loads_16"] >= TILE // (4 * 32 * SAMPLING[name])


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("kind", ["ragged", "fp32"])
def test_shapes_without_promises_and_fp32_compile_too(compiled: dict[str, dict[str, Any]], name: str, kind: str) -> None:
    assert compiled[f"{name}, {kind}"]["local_bytes"] == 0
    assert compiled[f"{name}, {kind}"]["shared_bytes"] <= SHARED_BYTES_PER_MULTIPROCESSOR
