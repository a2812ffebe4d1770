from __future__ import annotations

import pytest

from motet.twin.memory import ATTENTION_QKV, LLAMA2_7B, LLAMA31_8B

MIB = 1 << 20


def test_known_models_have_their_known_sizes() -> None:
    assert LLAMA2_7B.weight_bytes / 2 == pytest.approx(6.738e9, rel=1e-3)
    assert LLAMA31_8B.weight_bytes / 2 == pytest.approx(8.030e9, rel=1e-3)
    assert LLAMA2_7B.kv_token_bytes == 512 * 1024
    assert LLAMA31_8B.kv_token_bytes == 128 * 1024


def test_an_adapter_is_about_as_large_as_the_paper_says() -> None:
    """CaraServe section 2.3: rank 64 on q, k and v of Llama-2-7B is approximately 100 MiB, the KV cache of 200 tokens."""
    adapter_bytes = 64 * LLAMA2_7B.adapter_rank_bytes(ATTENTION_QKV)
    assert adapter_bytes == 96 * MIB
    assert adapter_bytes / LLAMA2_7B.kv_token_bytes == pytest.approx(200, rel=0.05)


def test_adapters_take_room_from_the_kv_cache() -> None:
    without = LLAMA2_7B.kv_blocks(24_000_000_000, adapter_bytes=0, block_size=16)
    beside = LLAMA2_7B.kv_blocks(24_000_000_000, adapter_bytes=2048 * MIB, block_size=16)
    assert without - beside == 2048 * MIB // (16 * LLAMA2_7B.kv_token_bytes)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="leave no room for a KV cache on 12288 MiB"):
        LLAMA2_7B.kv_blocks(12 << 30, adapter_bytes=0, block_size=16)
