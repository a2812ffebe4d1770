"""Promise: with speculative decoding vLLM draws several tokens per step, and the answers stay the same."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.cli.client import ApiError, Client
from motet.examples.demo import BASE, DEMO
from motet.examples.demo.tasks import TASKS
from motet.services.worker.vllm_engine.core import VllmOptions
from motet.services.worker.vllm_engine.engine import VllmEngine
from tests.e2e.asking import PROMPT, answered
from tests.e2e.live import LiveStack
from tests.engines.conftest import Driven
from tests.engines.support_mesh import core_of, go_on_through, vllm_stack
from tests.services.worker.support_engine import request

pytestmark = pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm")
NGRAM = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with vllm_stack(tmp_path_factory.mktemp("speculating"), DEMO / "model", NGRAM) as live:
        yield live


@pytest.fixture
async def client(stack: LiveStack) -> AsyncIterator[Client]:
    async with Client(stack.facts().urls[0], timeout_s=120.0) as client:
        yield client


async def test_adapters_answer_as_they_do_without_speculation(client: Client) -> None:
    for model in ("upper-case", "reverse", "rot13", "title-case", "swap-case"):  # more than slots
        task = next(one for one in TASKS if one.adapter == model)
        assert await answered(client, model, "hello there") == task.expected("hello there")


async def test_a_stream_gets_several_tokens_at_once_and_counts_them_all(client: Client) -> None:
    body = {"model": BASE, "prompt": PROMPT("abcabcabc"), "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    body |= {"logprobs": 1, "return_token_ids": True, "stream_options": {"include_usage": True}}
    sizes: list[int] = []
    usage: dict[str, Any] = {}
    async for event in client.events("/v1/completions", body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            tokens = choice.get("token_ids") or []
            assert len((choice["logprobs"] or {"tokens": []})["tokens"]) == len(tokens)
            sizes.append(len(tokens))
    assert sum(sizes) == usage["completion_tokens"] == 200
    assert max(sizes) > 1


async def test_streams_continue_as_they_would_have_when_the_core_is_killed(stack: LiveStack, client: Client) -> None:
    async def kill() -> None:
        [core] = core_of(stack.pid("worker-1"))
        os.kill(core, signal.SIGKILL)

    await go_on_through(client, kill)


@pytest.mark.parametrize(("field", "value"), [("min_p", 0.5), ("logit_bias", {"70": 5.0})])
async def test_what_vllm_cannot_combine_with_speculation_is_refused_by_name(client: Client, field: str, value: Any) -> None:
    with pytest.raises(ApiError, match="speculative") as refused:
        await client.call("POST", "/v1/completions", json={"model": BASE, "prompt": "x", "max_tokens": 2, field: value})
    assert refused.value.status == 400


def test_each_drafted_token_is_checked_with_the_temperature_of_its_request() -> None:
    """What vLLM 0.32 leaves uninitialized on a CPU."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    from motet.services.worker.vllm_engine import executors

    assert executors.BOUND
    current_platform.register_triton_kernel_overrides()
    for dtype in (torch.float32, torch.int32, torch.int64):
        given, ends = torch.tensor([0, 7, 3], dtype=dtype), torch.tensor([2, 5, 6], dtype=torch.int32)
        assert expand_batch_to_tokens(given, ends, 6, replace_from=0, replace_to=1).tolist() == [1, 1, 7, 7, 7, 3]


async def test_greedy_tokens_beside_sampled_ones_are_those_of_the_model(model_dir: Path) -> None:
    prompt, length = [3, 14, 15, 92, 3, 14, 15], 150
    reports: list[Any] = []
    options = VllmOptions(
        model_dir=model_dir,
        max_running=4,
        max_step_tokens=64,
        max_loras=2,
        max_lora_rank=16,
        max_model_len=256,
        dtype="float32",
        kv_bytes=16 << 20,
        extra=NGRAM,
    )
    engine = VllmEngine(options, reports.append)
    await engine.start()
    try:
        driven, one = (
            Driven(engine, reports, [], resumes_sampled=False),
            request("a", prompt, max_tokens=length, ignore_eos=True),
        )
        for number in range(2):
            engine.add(request(f"sampled-{number}", prompt, max_tokens=length, ignore_eos=True, temperature=0.7))
        engine.add(one)
        assert await driven.tokens(one) == greedy(model_dir, prompt, length)
        assert any(len(item.tokens) > 1 for item in driven.items("a"))
    finally:
        await engine.stop()


def greedy(model_dir: Path, prompt: list[int], length: int) -> list[int]:
    """The most likely tokens by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=None
        )
    return [int(token) for token in out[0, len(prompt) :]]
