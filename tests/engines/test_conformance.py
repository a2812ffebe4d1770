"""Promise: a worker can have any of these engines, and nobody outside of it notices beyond what the engine declares."""

from __future__ import annotations

import pytest

from motet.shared.errors import WorkerLost
from tests.engines.conftest import Driven
from tests.services.worker.support_engine import request
from tests.support import eventually


async def test_every_request_gets_its_tokens_in_order_and_one_end(driven: Driven) -> None:
    requests = [request(f"r{i}", [1, 2, 3 + i], max_tokens=3 + i) for i in range(8)]  # more than run at once
    for one in requests:
        driven.engine.add(one)
    for one in requests:
        assert (await driven.ended(one)).finish == "length"
        assert len(await driven.tokens(one)) == one.sampling.max_tokens


async def test_what_one_request_does_wrong_ends_that_request_alone(driven: Driven) -> None:
    wrong = request("wrong", [1], allowed_token_ids=(5,), bad_words=((5,),))  # nothing that may be drawn is left
    right = request("right", [1, 2])
    driven.engine.add(wrong)
    driven.engine.add(right)
    end = await driven.ended(wrong)
    assert end.finish == "error" and end.error is not None and end.error.code == "invalid_value"
    assert (await driven.ended(right)).finish == "length"


async def test_a_cancelled_request_ends_once_and_an_older_cancel_does_not_reach_a_newer_epoch(driven: Driven) -> None:
    long, other = request("long", [1], max_tokens=200), request("other", [2], max_tokens=30, epoch=3)
    driven.engine.add(long)
    driven.engine.add(other)
    driven.engine.cancel("other", 2)
    driven.engine.cancel("nobody", 0)
    driven.engine.cancel("long", 0)
    driven.engine.cancel("long", 0)
    assert (await driven.ended(long)).finish == "cancelled"
    assert (await driven.ended(other)).finish == "length"


async def test_a_request_that_was_resumed_continues_as_it_would_have(driven: Driven) -> None:
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        if name == "sampled" and driven.engine.capabilities.exact_resume != "sampled":
            continue
        whole = request(f"{name} whole", [5, 6, 7], max_tokens=12, temperature=temperature, seed=7)
        driven.engine.add(whole)
        tokens = await driven.tokens(whole)
        resumed = request(
            f"{name} resumed", [5, 6, 7], output=tokens[:5], epoch=1, max_tokens=12, temperature=temperature, seed=7
        )
        driven.engine.add(resumed)
        assert tokens[5:] == await driven.tokens(resumed)


async def test_adapters_change_what_is_said_and_their_residency_is_reported(driven: Driven) -> None:
    base, *others = [request(f"r{i}", [1, 2, 3], adapter) for i, adapter in enumerate([None, *driven.adapters[:3]])]
    for one in (base, *others):
        driven.engine.add(one)
    said = [tuple(await driven.tokens(one)) for one in (base, *others)]
    assert len(set(said)) == len(said)
    assert 0 < len(driven.on_device()) <= 2, "as many as there are slots"


async def test_an_adapter_is_loaded_and_unloaded_without_a_request(driven: Driven) -> None:
    adapter = driven.adapters[0]
    driven.engine.load_adapter(adapter)
    await eventually(lambda: driven.on_device() == {adapter.digest})
    driven.engine.unload_adapter(adapter.digest)
    await eventually(lambda: driven.on_device() == set())


async def test_an_adapter_that_is_in_use_is_unloaded_after_its_last_request(driven: Driven) -> None:
    adapter = driven.adapters[0]
    user = request("user", [1], adapter, max_tokens=100)
    driven.engine.add(user)
    await eventually(lambda: driven.items("user"))
    driven.engine.unload_adapter(adapter.digest)
    assert (await driven.ended(user)).finish == "length"
    await eventually(lambda: driven.on_device() == set())


async def test_logprobs_are_given_where_they_are_declared(driven: Driven) -> None:
    if not driven.engine.capabilities.logprobs:
        pytest.skip("the engine has none")
    one = request("r", [1, 2], max_tokens=3, logprobs=2)
    driven.engine.add(one)
    await driven.ended(one)
    given = [logprobs for item in driven.items("r") for logprobs in item.logprobs or []]
    assert len(given) == 3 and all(len(one.top_ids) == 2 and one.logprob <= 0 for one in given)


async def test_aborting_ends_everything_with_the_error_given(driven: Driven) -> None:
    requests = [request(f"r{i}", [1, i + 1], max_tokens=200) for i in range(6)]
    for one in requests:
        driven.engine.add(one)
    await eventually(lambda: driven.items("r0"))
    driven.engine.abort_all(WorkerLost("leaving"))
    for one in requests:
        end = await driven.ended(one)
        assert end.finish == "error" and end.error is not None and end.error.code == "worker_lost"


async def test_memory_is_given_back_and_an_idle_engine_is_silent(driven: Driven) -> None:
    first, second = request("first", [1] * 9), request("second", [2] * 9)
    driven.engine.add(first)
    await driven.ended(first)
    free = driven.reports[-1].kv_blocks_free
    driven.engine.add(second)
    await driven.ended(second)
    assert driven.reports[-1].kv_blocks_free == free
    assert [report.step for report in driven.reports] == sorted(report.step for report in driven.reports)
    await eventually(lambda: driven.engine.busy_s() == 0.0)
