"""Promise: an encoder learns lengths from text, is stored in a directory, and predicts in batches or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from bench.predictor import made_up_requests
from motet.cli.main import cli
from motet.policies.lengths.model import Curve
from motet.policies.lengths.predictor import Predicted
from motet.policies.lengths.quantiles import Estimate
from motet.services.predictor import proxy
from motet.services.predictor.examples import example, read_examples
from motet.services.predictor.proxy_batches import BATCH_MAX, WAITING_MAX, ProxyBatches
from motet.services.predictor.service import PredictorService
from motet.shared import subjects
from motet.shared.config import ConfigError
from motet.shared.wire.prediction import Outcome, PredictReply, PredictRequest
from tests.services.predictor.test_service import features, predictor  # noqa: F401
from tests.support import eventually

REQUESTS = made_up_requests(300, 1)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights and a vocabulary of these texts' words."""
    directory, texts = tmp_path_factory.mktemp("encoder"), [one.text for one in REQUESTS]
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(directory)
    shape = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(1)  # some first weights do not learn these few requests in a dozen rounds
    BertModel(shape).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def trained(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a proxy model that has learned the made-up requests."""
    directory = tmp_path_factory.mktemp("proxy")
    proxy.train(REQUESTS, encoder, epochs=12, device="cpu").save(directory)
    return directory


def p50(model: proxy.Proxy, text: str) -> float:
    return model.curve.tokens(model.above([text])[0], [0.5])[0]


def test_a_trained_model_tells_prompts_apart_and_is_read_back_from_its_directory(trained: Path) -> None:
    model = proxy.Proxy.load(trained, "cpu")
    assert p50(model, "answer yes or no: birds and poems") < 20 < 100 < p50(model, "write a long story about birds and poems")
    assert len(model.facts.levels) == 15 and model.facts.trained_on == 285
    texts = ["list five facts about bread and trains", "", "name one of the violins and rivers", "unknown words only"]
    assert np.allclose(model.above(texts), np.vstack([model.above([text]) for text in texts]), atol=1e-5)


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, encoder: Path) -> None:
    with pytest.raises(ConfigError, match="predictor-proxy"):
        proxy.Proxy.load(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        proxy.train(REQUESTS, tmp_path)
    with pytest.raises(ConfigError, match="too few"):
        proxy.train(REQUESTS[:9], encoder)


def test_the_commands_train_and_evaluate_from_files(encoder: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "requests.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"prompt": one.text, "output_tokens": one.tokens}) + "\n" for one in REQUESTS[:200]))
    words = ["predictor", "train", "--data", data, "--encoder", encoder, "--out", out, "--epochs", 1, "--device", "cpu"]
    done = CliRunner().invoke(cli, [*map(str, words)])
    assert done.exit_code == 0, done.output
    assert "190 of 200" in done.output
    done = CliRunner().invoke(cli, ["predictor", "evaluate", "--data", str(data), "--train", str(data), "--proxy", str(out)])
    assert done.exit_code == 0, done.output
    for figure in ("accuracy, 3 classes", "mean error of p50", "end below p90", "a batch of 32", "default", "proxy"):
        assert figure in done.output
    data.write_text('{"prompt": "no length"}\n')
    done = CliRunner().invoke(cli, [*map(str, words)])
    assert done.exit_code == 1 and "requests.jsonl:1" in done.output


def test_conversations_prompts_and_instruction_sets_are_read(tmp_path: Path) -> None:
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert example({"messages": conversation, "output_tokens": 3}).text == "hello"
    assert example({"instruction": "Sort", "input": "b, a", "output": "a, b c"}).tokens == 3
    assert example({"instruction": "Sort", "input": "b, a", "output_tokens_est": 7}).text == "Sort\nb, a"
    assert (
        example({"prompt": "x", "output_tokens": 2, "max_tokens": 9}).features
        != example({"prompt": "x", "output_tokens": 2}).features
    )
    with pytest.raises(ConfigError, match="absent"):
        read_examples(tmp_path / "absent")


# ---- in the predictor


class Scripted:
    """A model that answers 10 tokens for short texts and 1,000 for others, after `delay_s`; counts its batches."""

    curve = Curve(np.array([20.0, 500.0]), 2000.0)

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.broken = False

    def above(self, texts: Sequence[str]) -> np.ndarray:
        self.batches.append(len(texts))
        if self.broken:
            raise RuntimeError("no")
        return np.array([[0.1, 0.0] if len(text) < 9 else [1.0, 0.9] for text in texts])


OTHER = Predicted(estimate=Estimate(p50_tokens=50, p90_tokens=60, samples=5), basis="prompt")


def ask(text: str, adapter: str = "") -> PredictRequest:
    return PredictRequest(adapter_digest=adapter, prompt_tokens=3, max_tokens=5000, features=text.encode(), prompt_text=text)


async def test_prompts_that_arrive_together_are_answered_in_few_batches() -> None:
    model = Scripted()
    proxy = ProxyBatches(model, [], 100)
    found = await asyncio.gather(*(proxy.estimate(ask("short" if n % 2 else "a long prompt"), OTHER) for n in range(100)))
    assert {one.estimate.p50_tokens > 500 for one in found[::2]} == {True}
    assert {one.estimate.p50_tokens < 20 for one in found[1::2]} == {True}
    assert max(model.batches) <= BATCH_MAX and len(model.batches) <= 5 and found[0].basis == "proxy"


async def test_without_an_answer_of_the_proxy_the_other_prediction_is_used() -> None:
    model = Scripted()
    proxy = ProxyBatches(model, [], 100)
    found = await asyncio.gather(*(proxy.estimate(ask("short"), OTHER) for _ in range(WAITING_MAX + 50)))
    assert 0 < sum(one is OTHER for one in found) <= 50
    model.broken = True
    assert await proxy.estimate(ask("short"), OTHER) is OTHER
    await proxy.close()


async def test_where_the_proxy_has_been_worse_the_other_prediction_is_used() -> None:
    proxy = ProxyBatches(Scripted(), [], 100)
    for number in range(60):
        request = ask(f"a long prompt {number}", "d")
        await proxy.estimate(request, OTHER)
        proxy.observe("d", request.features, 50)
    assert await proxy.estimate(ask("a long prompt", "d"), OTHER) is OTHER


async def test_a_predictor_with_a_proxy_reads_the_texts_that_gateways_send(connect, predictor, trained):  # noqa: F811
    bus = await connect()
    service: PredictorService = await predictor(predictor_proxy=str(trained))
    lengths = {}
    for text in ("answer yes or no: birds and poems", "write a long story about birds and poems"):
        request = PredictRequest(adapter_digest="", prompt_tokens=5, max_tokens=999, features=features(text), prompt_text=text)
        reply = await bus.request(subjects.PREDICT, request, PredictReply, timeout_s=10.0)
        lengths[text] = reply.p50_tokens
        outcome = Outcome(adapter_digest="", prompt_tokens=5, output_tokens=reply.p50_tokens, features=features(text))
        await bus.publish(subjects.OUTCOME, outcome)
    assert min(lengths.values()) < 20 < 100 < max(lengths.values())
    await eventually(lambda: service.proxy is not None and service.proxy.calibration.all.samples == 2)
