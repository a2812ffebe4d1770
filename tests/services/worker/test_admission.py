"""Promise: what a model cannot run is refused when it arrives, with the field and the reason; engines rely on that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from motet.services.worker.admission import Acceptable, admit, check
from motet.shared.errors import BadRequest, ModelNotFound, MotetError, PromptTooLong
from motet.shared.model import IMAGES_MAX, AdapterRef, EmbeddingParams, KvOffer, SamplingParams, Slo
from motet.shared.wire.request import GenerateRequest, Image, pack_tokens

VOCAB, LONGEST, EOS = 100, 32, 2
ACCEPTABLE = Acceptable(
    base_model="base", vocab_size=VOCAB, eos_token_ids=frozenset({EOS}), max_model_len=LONGEST, max_lora_rank=16
)


def asked(
    prompt: list[int], output: list[int] | None = None, adapter: AdapterRef | None = None, base: str = "base", **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        gateway_id="g",
        base_model=base,
        prompt=pack_tokens(prompt),
        output=pack_tokens(output or []),
        adapter=adapter,
        slo=Slo(),
        sampling=SamplingParams(**{"max_tokens": 4} | sampling),
    )


def test_what_the_engine_cannot_do_is_refused_with_the_field_that_asks_for_it() -> None:
    request = msgspec.structs.replace(asked([1, 2, 3]), needs={"structured": "regex"})
    with pytest.raises(BadRequest) as refused:
        check(request, ACCEPTABLE)
    assert refused.value.param == "regex"
    check(request, replace(ACCEPTABLE, serves=frozenset({"structured"})))


def test_a_pooling_model_takes_embeddings_alone_and_others_take_none() -> None:
    pooling = replace(ACCEPTABLE, serves=frozenset({"embeddings"}))
    asks = {"needs": {"embeddings": "model"}, "embedding": EmbeddingParams()}
    text, embedding = asked([5] * 4), msgspec.structs.replace(asked([5] * LONGEST), **asks)
    check(embedding, pooling)
    for request, acceptable in ((text, pooling), (embedding, ACCEPTABLE)):
        with pytest.raises(BadRequest) as refused:
            check(request, acceptable)
        assert refused.value.param == "model"
    embedding = msgspec.structs.replace(embedding, prompt=pack_tokens([5] * (LONGEST + 1)))
    with pytest.raises(PromptTooLong) as too_long:
        check(embedding, pooling)
    assert too_long.value.param == "input"


def test_the_engine_gets_everything_that_was_asked_for() -> None:
    asking = msgspec.structs.replace(
        asked([1, 2, 3], [4], temperature=0.5), epoch=2, losses=1, priority=3, predicted_tokens=40, tenant="acme",
        tenant_weight=2.0, slo=Slo(ttft_slo_ms=100.0), cache_salt="s", needs={}, kv=KvOffer(worker_id="w", token="t"),
    )  # fmt: skip
    taken = admit(asking, ACCEPTABLE, 5.0)
    assert (taken.tokens.tolist(), taken.arrival_s, taken.weights) == ([1, 2, 3, 4], 5.0, None)
    assert len(asking.__struct_fields__) > 20
    for name in asking.__struct_fields__:
        assert getattr(taken, name) == getattr(asking, name), name


def test_tenants_share_blocks_of_the_base_model_alone_and_only_where_that_is_allowed() -> None:
    def scopes(acceptable: Acceptable, adapter: AdapterRef | None = None) -> int:
        requests = [msgspec.structs.replace(asked([1], adapter=adapter), tenant=tenant) for tenant in ("one", "acme")]
        return len({admit(request, acceptable, 0.0).cache_scope for request in requests})

    sharing = replace(ACCEPTABLE, share_prefix_cache=True)
    assert scopes(ACCEPTABLE) == 2 and scopes(sharing) == 1
    assert scopes(sharing, AdapterRef(name="a", digest="d", rank=8, size_bytes=9)) == 2


def test_what_fits_is_taken() -> None:
    request = asked([1, 2, 3], [4], logit_bias={5: 1.0}, allowed_token_ids=(5, 6), bad_words=((5,), (6, 6)))
    check(request, ACCEPTABLE)
    check(asked([1] * (LONGEST - 1)), ACCEPTABLE)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prompt": [1], "base": "other"}, ModelNotFound, "'other'"),
        ({"prompt": []}, BadRequest, "no tokens"),
        ({"prompt": [5] * LONGEST}, PromptTooLong, f"{LONGEST} tokens"),
        ({"prompt": [5] * 20, "output": [5] * 20}, PromptTooLong, "20 prompt tokens and 20"),
        ({"prompt": [5, VOCAB]}, BadRequest, "prompt"),
        ({"prompt": [-1]}, BadRequest, "prompt"),
        ({"prompt": [5], "output": [VOCAB]}, BadRequest, "output"),
        ({"prompt": [5], "logit_bias": {VOCAB: 1.0}}, BadRequest, "logit_bias"),
        ({"prompt": [5], "allowed_token_ids": (VOCAB,)}, BadRequest, "allowed_token_ids has token ids outside"),
        ({"prompt": [5], "bad_words": ((1, -4),)}, BadRequest, "bad_words"),
        ({"prompt": [5], "allowed_token_ids": (5,), "bad_words": ((5,),)}, BadRequest, "leaves no token"),
        ({"prompt": [5], "allowed_token_ids": (EOS,), "min_tokens": 1}, BadRequest, "leaves no token"),
        (
            {"prompt": [5], "allowed_token_ids": (5,), "min_tokens": 1, "stop_token_ids": (5,)},
            BadRequest,
            "leaves no token",
        ),
        ({"prompt": [5], "adapter": AdapterRef(name="a", digest="d", rank=32, size_bytes=1)}, BadRequest, "rank 32"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_with_the_reason(changes: dict[str, Any], error: type[MotetError], words: str) -> None:
    with pytest.raises(error, match=words):
        check(asked(**changes), ACCEPTABLE)


def test_images_are_taken_where_the_model_reads_them() -> None:
    image = Image(data=b"x", param="messages[0].content[1]")
    request = msgspec.structs.replace(asked([1, 2, 3]), images=[image])
    with pytest.raises(BadRequest, match="no images") as refused:
        check(request, ACCEPTABLE)
    assert refused.value.param == "messages[0].content[1]"
    seeing = replace(ACCEPTABLE, serves=frozenset({"images"}))
    check(request, seeing)
    with pytest.raises(BadRequest, match=str(IMAGES_MAX)):
        check(msgspec.structs.replace(request, images=[image] * (IMAGES_MAX + 1)), seeing)


def test_a_worker_without_adapters_says_so() -> None:
    adapter = AdapterRef(name="a", digest="d", rank=8, size_bytes=1)
    with pytest.raises(BadRequest, match="without adapters") as refused:
        check(asked([1], adapter=adapter), replace(ACCEPTABLE, max_lora_rank=0))
    assert refused.value.param == "model"
