"""Promise: what vLLM can adapt is accepted: adapters of any layer of the base run on vLLM's workers, and on no others."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.cli.adapters import upload
from motet.cli.client import ApiError, Client
from motet.examples.demo import BASE, DEMO
from tests.e2e.live import LiveStack
from tests.engines.support_mesh import START_S, native_worker, serving, vllm_stack, workers
from tests.support import eventually

pytestmark = pytest.mark.skipif(not os.environ.get("MOTET_TEST_VLLM"), reason="needs vLLM: make test-vllm")
PROMPT = [40, 51, 62, 73, 84, 95, 106]
LENGTH = 24
PHI_TARGETS = {"mlp": ["fc1", "fc2"], "outer": ["embed_tokens", "dense"], "mixed": ["q_proj", "v_proj", "dense", "fc2"]}


async def tokens(client: Client, model: str) -> list[int]:
    """The tokens of a greedy completion."""
    body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    answer = await client.call("POST", "/v1/completions", json=body | {"return_token_ids": True})
    return [int(token) for token in answer["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of an architecture that no native worker serves, and a directory of adapters."""
    from tests.engines import support_layers

    model = support_layers.make_phi(tmp_path_factory.mktemp("phi") / "model")
    adapters = tmp_path_factory.mktemp("phi-adapters")
    for seed, (name, targets) in enumerate(PHI_TARGETS.items()):
        support_layers.make_adapter(model, adapters / name, targets, seed=seed)
    return model, adapters


@pytest.fixture(scope="module")
def phi_stack(phi: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with vllm_stack(tmp_path_factory.mktemp("phi-stack"), phi[0], "", adapters=phi[1]) as live:
        yield live


@pytest.fixture
async def phi_client(phi_stack: LiveStack) -> AsyncIterator[Client]:
    async with Client(phi_stack.facts().urls[0], timeout_s=120.0) as client:
        yield client


async def test_adapters_of_another_architecture_draw_pefts_tokens(phi: tuple[Path, Path], phi_client: Client) -> None:
    from tests.engines import support_layers

    model, adapters = phi
    expected = {name: support_layers.greedy(model, adapters / name, PROMPT, LENGTH) for name in PHI_TARGETS}
    expected[BASE] = support_layers.greedy(model, None, PROMPT, LENGTH)
    assert len({tuple(one) for one in expected.values()}) == len(expected), "each adapter changes the answer"
    assert {name: await tokens(phi_client, name) for name in expected} == expected


async def test_they_are_listed_with_their_kind_layers_and_workers(phi_client: Client) -> None:
    cards = {card["name"]: card for card in (await phi_client.call("GET", "/v1/adapters"))["data"]}
    card = cards["mixed"]
    assert (card["kind"], card["workers"], card["modules"]) == ("peft", ["worker-1"], ["dense", "fc2", "q_proj", "v_proj"])
    assert card["targets"] == [
        *("model.layers.*.mlp.fc2", "model.layers.*.self_attn.dense"),
        *("model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.v_proj"),
    ]


async def test_layers_that_vllm_cannot_adapt_are_refused_by_name(
    phi: tuple[Path, Path], phi_client: Client, tmp_path: Path
) -> None:
    """Phi has an output layer, but vLLM has no LoRA for it in this architecture."""
    from tests.engines import support_layers

    support_layers.make_adapter(phi[0], tmp_path / "head", ["lm_head"])
    with pytest.raises(ApiError) as refused:
        await upload(phi_client, "head", tmp_path / "head")
    assert refused.value.status == 400 and "lm_head" in str(refused.value)


async def test_in_a_mixed_cluster_they_go_to_vllm_alone(tmp_path: Path) -> None:
    """One of the output layer and the embeddings, which only vLLM computes, and one of the seven modules, which both do."""
    from tests.engines import support_layers

    model = DEMO / "model"
    support_layers.make_adapter(model, tmp_path / "both" / "outer", ["lm_head", "embed_tokens", "q_proj"], strength=0.3)
    support_layers.make_adapter(model, tmp_path / "both" / "inner", ["q_proj", "v_proj"])
    expected = {name: support_layers.greedy(model, tmp_path / "both" / name, PROMPT, LENGTH) for name in ("outer", "inner")}
    with vllm_stack(tmp_path, model, "", adapters=tmp_path / "both") as stack:
        async with Client(stack.facts().urls[0], timeout_s=120.0) as client, native_worker(stack) as start:
            await start()
            await eventually(lambda: serving(client, "native"), within_s=START_S, every_s=0.2)
            cards = {card["name"]: card for card in (await client.call("GET", "/v1/adapters"))["data"]}
            assert {name: (card["kind"], card["workers"]) for name, card in cards.items()} == {
                "outer": ("peft", ["worker-1"]),
                "inner": ("lora", ["native", "worker-1"]),
            }
            for _ in range(8):
                assert {name: await tokens(client, name) for name in expected} == expected
            os.kill(stack.pid("worker-1"), signal.SIGSTOP)  # it no longer reports
            await eventually(lambda: only_native(client), within_s=60, every_s=0.2)
            try:
                with pytest.raises(ApiError) as refused:
                    await tokens(client, "outer")
                assert refused.value.status in (400, 503), refused.value
                assert "can run this adapter" in str(refused.value) and "lm_head" in str(refused.value)
                assert await tokens(client, "inner") == expected["inner"]
            finally:
                os.kill(stack.pid("worker-1"), signal.SIGCONT)
            await eventually(lambda: serving(client, "worker-1"), within_s=START_S, every_s=0.2)
            assert await tokens(client, "outer") == expected["outer"]


async def only_native(client: Client) -> bool:
    return {worker["worker_id"] for worker in await workers(client)} == {"native"}
