"""Promise: Motet's plug-in changes nothing in vLLM but speed and memory, and steps aside where it would.

vLLM computes a request without an adapter by its last slot when others are batched with it, so one slot stays empty here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from motet.examples.demo import DEMO
from tests.support_models import AdapterFixture, Oracle, make_adapters, random_prompts

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[2]
PROCESS_S = 600
TOKENS = 12
SLOTS = 9  # of 8 adapters, ranks 4 to 64
OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 24, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}
OPTIONS |= {"max_lora_rank": 64, "max_cpu_loras": 16, "max_num_batched_tokens": 64, "seed": 0}
"""Chunked prefill: a step has 64 tokens."""
EAGER = {"enforce_eager": True}
MOTET, VLLM = "PunicaWrapperMotet", "PunicaWrapperCPU"
Found = dict[str, Any]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFixture]:
    return make_adapters(DEMO / "model", tmp_path_factory.mktemp("vllm-lora"))


@pytest.fixture(scope="module")
def laps() -> list[dict[str, Any]]:
    """All adapters and the base at once, long prompts twice, adapters that come and go, one replaced, some removed."""
    prompts = random_prompts(18, seed=1, shortest=2, longest=60)
    mixed = [[prompt, number % 9 - 1] for number, prompt in enumerate(prompts)]
    long = [[prompt * 5, number - 1] for number, prompt in enumerate(random_prompts(9, seed=2, shortest=30, longest=40))]
    return [
        {"ask": mixed, "tokens": TOKENS},
        {"ask": long, "tokens": TOKENS},
        {"ask": long, "tokens": TOKENS},  # by now the prefixes are cached
        {"churn": mixed + long, "tokens": TOKENS},
        {"replace": [2, 6]},
        {"ask": mixed, "tokens": TOKENS},
        {"remove": [0, 3]},
        {"ask": mixed, "tokens": TOKENS},
    ]


def run(
    tmp: Path,
    adapters: list[AdapterFixture],
    laps: list[dict[str, Any]],
    *,
    wrong: bool = False,
    env: dict[str, str] | None = None,
    **options: Any,
) -> Found:
    """What a process of vLLM answers; `log` is what it said."""
    result = tmp / "found.json"
    setup = {"model": str(DEMO / "model"), "adapters": [str(one.path) for one in adapters], "laps": laps}
    module = "tests.engines.vllm_wrong_kernel" if wrong else "bench.vllm_lora_process"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(result)],
        input=json.dumps(setup | {"options": OPTIONS | options}) + "\n",
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        cwd=ROOT,
        env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | (env or {}),
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    return json.loads(result.read_text(encoding="utf-8")) | {"log": log}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, adapters: list[AdapterFixture], laps: list[dict[str, Any]]) -> Found:
    """vLLM without the plug-in."""
    off = {"MOTET_VLLM_LORA": "0"}
    return run(tmp_path_factory.mktemp("alone"), adapters, laps, env=off, max_loras=SLOTS, **EAGER)


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory, adapters: list[AdapterFixture], laps: list[dict[str, Any]]) -> Found:
    """vLLM with the plug-in; the model is compiled."""
    return run(tmp_path_factory.mktemp("plugged"), adapters, laps, max_loras=SLOTS)


def test_it_is_used_where_it_is_installed_and_the_switch_turns_it_off(alone: Found, plugged: Found) -> None:
    assert plugged["wrapper"] == MOTET and "LoRA is computed by Motet's kernels" in plugged["log"]
    assert alone["wrapper"] == VLLM and "Motet" not in alone["log"]


def test_every_answer_is_that_of_vllm_alone(alone: Found, plugged: Found, laps: list[dict[str, Any]]) -> None:
    for lap, wanted, got in zip(laps, alone["laps"], plugged["laps"], strict=True):
        assert got == wanted, lap
    assert plugged["laps"][2] == plugged["laps"][1], "cached prefixes"
    assert plugged["laps"][5] != plugged["laps"][0], "a replaced adapter"


def test_every_answer_is_that_of_peft(plugged: Found, adapters: list[AdapterFixture], laps: list[dict[str, Any]]) -> None:
    oracle = Oracle(DEMO / "model", adapters)
    for at in (0, 1):
        asked = laps[at]["ask"]
        wanted = [oracle.greedy(prompt, TOKENS, None if number < 0 else adapters[number]) for prompt, number in asked]
        assert plugged["laps"][at] == wanted


def test_a_slot_takes_what_its_adapter_needs_and_an_empty_one_nothing(alone: Found, plugged: Found) -> None:
    assert alone["slot_bytes"] == alone["all_slots_bytes"] == plugged["all_slots_bytes"]
    assert 0 < plugged["slot_bytes"] < 0.3 * alone["slot_bytes"]


def test_adapters_that_share_few_slots_answer_as_with_many(
    tmp_path: Path, plugged: Found, adapters: list[AdapterFixture], laps: list[dict[str, Any]]
) -> None:
    found = run(tmp_path, adapters, laps[:1] + laps[3:4], max_loras=2, **EAGER)
    assert found["wrapper"] == MOTET
    assert found["laps"] == [plugged["laps"][0], plugged["laps"][3]]


def test_it_steps_aside_when_a_kernel_is_wrong(
    tmp_path: Path, alone: Found, adapters: list[AdapterFixture], laps: list[dict[str, Any]]
) -> None:
    found = run(tmp_path, adapters, laps[:1], wrong=True, max_loras=SLOTS, **EAGER)
    assert found["wrapper"] == VLLM
    assert "step aside" in found["log"] and "differs from vLLM's" in found["log"]
    assert found["laps"] == alone["laps"][:1]
    assert found["slot_bytes"] == alone["slot_bytes"]


def test_without_a_compiler_vllm_is_as_it_was(
    tmp_path: Path, alone: Found, adapters: list[AdapterFixture], laps: list[dict[str, Any]]
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("lscpu", "numactl", "uname", "sh", "cat"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    nothing = {"MOTET_CACHE_DIR": str(tmp_path), "PATH": str(programs), "CXX": "/nonexistent"}
    told = run(tmp_path, adapters, laps[:1], env=nothing, max_loras=SLOTS, **EAGER)
    assert told["wrapper"] == VLLM and "no C++ compiler" in told["log"]
    assert told["laps"] == alone["laps"][:1]
