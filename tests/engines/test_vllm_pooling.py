"""Promise: vLLM with a pooling model makes the embeddings that the model defines, with and without adapters."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from motet.cli.client import ApiError, Client
from motet.examples.demo import BASE, DEMO
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.vllm_engine.core import VllmOptions
from motet.services.worker.vllm_engine.engine import POOLING, VllmEngine
from motet.shared.clock import now_s
from motet.shared.errors import from_info
from motet.shared.model import EmbeddingParams, SamplingParams
from motet.shared.wire.request import unpack_tokens
from tests.engines.conftest import Driven
from tests.engines.support_mesh import core_of, vllm_stack, workers

pytestmark = [
    pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm"),
    pytest.mark.asyncio(loop_scope="module"),
]
PROMPTS = [[3, 14, 15, 92, 65], [2, 71, 82, 81], [(7 * i) % 90 + 3 for i in range(200)]]
LONGEST = 256
DIMENSIONS = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooling(model_dir: Path, host_adapters: list[Any]) -> AsyncIterator[Driven]:
    """vLLM with the demo model turned into one for embeddings, whose dimensions may be shortened."""
    reports: list[Any] = []
    options = VllmOptions(
        model_dir=model_dir,
        max_running=4,
        max_step_tokens=64,
        max_loras=2,
        max_lora_rank=16,
        max_model_len=LONGEST,
        dtype="float32",
        kv_bytes=16 << 20,
        extra=f"""--runner pooling --hf-overrides '{{"matryoshka_dimensions": [{DIMENSIONS}]}}'""",
    )
    engine = VllmEngine(options, reports.append)
    await engine.start()
    yield Driven(engine, reports, host_adapters, resumes_sampled=False)
    await engine.stop()


def asks(name: str, prompt: list[int], adapter: Any = None, dimensions: int | None = None) -> EngineRequest:
    return EngineRequest.local(
        name,
        prompt,
        SamplingParams(max_tokens=1, temperature=0.0),
        weights=adapter,
        gateway_id="g",
        arrival_s=now_s(),
        embedding=EmbeddingParams(dimensions=dimensions),
    )


async def embedded(pooling: Driven, request: EngineRequest) -> np.ndarray:
    """The embedding of a request, which has one item without tokens."""
    last = await pooling.ended(request)
    assert (last.finish, last.error, len(pooling.items(request.request_id))) == ("stop", None, 1)
    assert not last.tokens
    return np.frombuffer(last.embedding, "<f4")


def expected(model_dir: Path, prompt: list[int]) -> np.ndarray:
    """The model's last hidden state of the last token, of length 1, as transformers computes it."""
    import torch
    from transformers import AutoModel

    with torch.inference_mode():
        model = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
        hidden = model(torch.tensor([prompt])).last_hidden_state[0, -1]
        return np.asarray(torch.nn.functional.normalize(hidden, dim=0))


async def test_embeddings_are_those_of_the_model(pooling: Driven, model_dir: Path) -> None:
    assert pooling.engine.serves == POOLING
    requests = [asks(f"base-{number}", prompt) for number, prompt in enumerate(PROMPTS)]
    for request in requests:
        pooling.engine.add(request)
    for request in requests:
        np.testing.assert_allclose(
            await embedded(pooling, request), expected(model_dir, unpack_tokens(request.prompt)), atol=1e-4
        )


async def test_an_adapter_changes_embeddings_beside_requests_without_an_adapter(pooling: Driven) -> None:
    adapters = [None, *pooling.adapters[:3]]  # more than slots
    requests = [asks(f"lora-{turn}-{n}", PROMPTS[0], one) for turn in range(2) for n, one in enumerate(adapters)]
    for request in requests:
        pooling.engine.add(request)
    found = [await embedded(pooling, request) for request in requests]
    for one, again in zip(found[:4], found[4:], strict=True):
        np.testing.assert_allclose(one, again, atol=1e-4)
    for number in range(1, 4):
        assert np.abs(found[number] - found[0]).max() > 1e-3


async def test_an_input_may_fill_the_context(pooling: Driven) -> None:
    request = asks("long", [5] * LONGEST)
    pooling.engine.add(request)
    assert np.linalg.norm(await embedded(pooling, request)) == pytest.approx(1.0, abs=1e-4)


async def test_dimensions_shorten_embeddings_and_impossible_ones_are_refused_by_name(pooling: Driven) -> None:
    short, wrong = asks("short", PROMPTS[0], dimensions=DIMENSIONS), asks("wrong", PROMPTS[0], dimensions=DIMENSIONS + 1)
    pooling.engine.add(short)
    pooling.engine.add(wrong)
    embedding = await embedded(pooling, short)
    assert embedding.shape == (DIMENSIONS,) and np.linalg.norm(embedding) == pytest.approx(1.0, abs=1e-4)
    refused = (await pooling.ended(wrong)).error
    assert refused is not None and (from_info(refused).status, refused.param) == (400, "dimensions")


async def test_a_request_for_an_embedding_can_be_cancelled(pooling: Driven) -> None:
    requests = [asks(f"back-{number}", [number + 3] * LONGEST) for number in range(12)]
    for request in requests:
        pooling.engine.add(request)
    pooling.engine.cancel("back-11", 0)
    assert (await pooling.ended(requests[11])).finish == "cancelled"
    for request in requests[:11]:
        await embedded(pooling, request)


async def test_a_mesh_of_a_pooling_model_answers_and_loses_no_embedding_with_its_core(tmp_path: Path) -> None:
    inputs = [[(number + i) % 90 + 3 for i in range(200)] for number in range(96)]

    async def embeddings(client: Client, model: str, given: list[Any]) -> np.ndarray:
        body = {"model": model, "input": given}
        told = await client.call("POST", "/v1/embeddings", json=body)
        assert told["usage"]["prompt_tokens"] >= len(given)
        return np.array([one["embedding"] for one in told["data"]])

    with vllm_stack(tmp_path, DEMO / "model", "--runner pooling") as stack:
        async with Client(stack.facts().urls[0], timeout_s=300.0) as client:
            [worker] = await workers(client)
            assert (worker["engine"], worker["capabilities"]) == ("vllm", ["embeddings"])
            models = (BASE, "upper-case", "reverse")
            texts = [await embeddings(client, model, ["hello there"]) for model in models]
            assert all(np.abs(one - other).max() > 1e-3 for one, other in pairwise(texts))
            calm = await embeddings(client, "upper-case", inputs)

            asking = asyncio.ensure_future(embeddings(client, "upper-case", inputs))
            [core] = core_of(stack.pid("worker-1"))
            os.kill(core, signal.SIGKILL)
            np.testing.assert_allclose(await asking, calm, atol=1e-4)

            with pytest.raises(ApiError, match="makes embeddings and no text") as refused:
                await client.call("POST", "/v1/completions", json={"model": BASE, "prompt": "x", "max_tokens": 1})
            assert refused.value.status == 400


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with random weights. Its layers are none of the seven of a Llama-shaped decoder."""
    import torch
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    folder = tmp_path_factory.mktemp("bert") / "model"
    BertModel(config).eval().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "model" / "tokenizer.json"), pad_token="<|pad|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def for_bert(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter of all linear layers in the blocks of `bert`, as PEFT saves it."""
    import peft
    from transformers import AutoModel

    config = peft.LoraConfig(r=4, target_modules=r"encoder\..*\.(query|key|value|dense)", init_lora_weights=False)
    folder = tmp_path_factory.mktemp("for-bert")
    peft.get_peft_model(AutoModel.from_pretrained(bert), config).save_pretrained(folder / "own")
    return folder


async def test_a_bert_makes_the_embeddings_of_transformers_and_with_an_adapter_those_of_peft(
    bert: Path, for_bert: Path, tmp_path: Path
) -> None:
    import peft
    import torch
    from transformers import AutoModel

    args = "--runner pooling --max-num-batched-tokens 128"
    with vllm_stack(tmp_path, bert, args, adapters=for_bert) as stack:
        async with Client(stack.facts().urls[0], timeout_s=300.0) as client:
            [worker] = await workers(client)
            assert worker["capabilities"] == ["embeddings"] and worker["adapter_bytes_total"] > 0
            base = AutoModel.from_pretrained(bert, dtype=torch.float32).eval()
            expected = {BASE: [first_hidden(base, prompt) for prompt in PROMPTS[:2]]}
            adapted = peft.PeftModel.from_pretrained(base, for_bert / "own").eval()
            expected["own"] = [first_hidden(adapted, prompt) for prompt in PROMPTS[:2]]
            assert np.abs(expected["own"][0] - expected[BASE][0]).max() > 1e-2
            for model, wanted in expected.items():
                told = await client.call("POST", "/v1/embeddings", json={"model": model, "input": PROMPTS[:2]})
                for one, embedding in zip(told["data"], wanted, strict=True):
                    np.testing.assert_allclose(one["embedding"], embedding, atol=1e-3)


def first_hidden(model: Any, prompt: list[int]) -> np.ndarray:
    """The last hidden state of the first token, of length 1."""
    import torch

    with torch.inference_mode():
        state = model(input_ids=torch.tensor([prompt])).last_hidden_state[0, 0]
    return np.asarray(torch.nn.functional.normalize(state, dim=0))
