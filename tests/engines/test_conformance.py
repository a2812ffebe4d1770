"""Promise: every engine behaves alike outside of the worker, except for what it declares."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from motet.policies.owner.owner_core import LOSSES_MAX
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.vllm_engine.engine import VllmEngine
from motet.services.worker.vllm_engine.peft_files import PeftAdapter
from motet.shared.errors import WorkerLost
from motet.shared.model import StructuredOutput
from motet.shared.wire.request import pack_tokens
from tests.engines.conftest import Driven
from tests.services.worker.support_engine import request
from tests.support import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_every_request_gets_its_tokens_in_order_and_one_end(driven: Driven) -> None:
    requests = [request(f"r{i}", [1, 2, 3 + i], max_tokens=3 + i) for i in range(8)]  # more than run at once
    for one in requests:
        driven.engine.add(one)
    for one in requests:
        assert (await driven.ended(one)).finish == "length"
        assert len(await driven.tokens(one)) == one.sampling.max_tokens


async def test_a_sampled_request_may_have_a_prompt_of_several_steps(driven: Driven) -> None:
    one = request("r", list(range(3, 203)), temperature=1.0, seed=3, max_tokens=4)
    driven.engine.add(one)
    end = await driven.ended(one)
    assert end.finish == "length", end.error


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
        if name == "sampled" and not driven.resumes_sampled:
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


async def test_requests_of_the_base_and_of_more_adapters_than_slots_get_the_answers_they_get_alone(driven: Driven) -> None:
    """vLLM pauses the requests of one adapter for those of another meanwhile."""
    adapters = [None, *driven.adapters[:4]]
    for number, adapter in enumerate(adapters):
        driven.engine.add(alone := request(f"alone {number}", [1, 2, 3 + number], adapter, max_tokens=40))
        await driven.ended(alone)
    together = [request(f"together {number}", [1, 2, 3 + number], one, max_tokens=40) for number, one in enumerate(adapters)]
    for one in together[:3]:
        driven.engine.add(one)
    await eventually(lambda: all(driven.items(one.request_id) for one in together[:3]))  # the slots are taken
    for one in together[3:]:
        driven.engine.add(one)
    for number, one in enumerate(together):
        assert await driven.tokens(one) == [t for item in driven.items(f"alone {number}") for t in item.tokens]
    if isinstance(driven.engine, VllmEngine):
        assert sum(report.output.stats.preempted for report in driven.reports) > 0


async def test_an_adapter_that_left_its_slot_stays_in_host_memory(driven: Driven) -> None:
    """vLLM keeps the weights as long as the worker has its copy."""
    if not isinstance(driven.engine, VllmEngine):
        pytest.skip("the worker's own copy is all that there is")
    adapter: PeftAdapter = driven.adapters[0]
    driven.engine.add(before := request("before", [1, 2, 3], adapter))
    await driven.ended(before)
    driven.engine.unload_adapter(adapter.digest)
    await eventually(lambda: driven.on_device() == set())
    away = adapter.folder.rename(adapter.folder.with_name("away"))
    try:
        driven.engine.add(after := request("after", [1, 2, 3], adapter))
        assert await driven.tokens(after) == await driven.tokens(before)
    finally:
        away.rename(adapter.folder)


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
    one = request("r", [1, 2], max_tokens=3, logprobs=2)
    driven.engine.add(one)
    await driven.ended(one)
    given = [logprobs for item in driven.items("r") for logprobs in item.logprobs or []]
    assert len(given) == 3 and all(len(one.top_ids) == 2 and one.logprob <= 0 for one in given)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (StructuredOutput(kind="choice", value='["left", "right"]'), "left|right"),
        (StructuredOutput(kind="regex", value="[ab]{3}-[0-9]"), "[ab]{3}-[0-9]"),
        (StructuredOutput(kind="grammar", value='root ::= "x" ("y" | "z") "!"'), "x(y|z)!"),
        (StructuredOutput(kind="json", value='{"enum": [17, 42]}'), "17|42"),
        (
            StructuredOutput(
                kind="json",
                value='{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}',
                disable_any_whitespace=True,
                disable_additional_properties=True,
            ),
            r'\{"a": ?(true|false)\}',
        ),
        (StructuredOutput(kind="json_object"), r"\{[\s\S]*"),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
async def test_a_constraint_holds_where_it_is_declared(
    driven: Driven, model_dir: Path, constraint: StructuredOutput, pattern: str, adapted: bool
) -> None:
    if "structured" not in driven.engine.serves:
        pytest.skip("the engine has none")
    adapter = driven.adapters[0] if adapted else None
    one = request("r", [1, 2], adapter, max_tokens=40, structured=constraint, ignore_eos=False)
    driven.engine.add(one)
    end, tokens = await driven.ended(one), await driven.tokens(one)
    assert end.error is None
    text = Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(tokens[:-1] if end.finish == "stop" else tokens)
    assert re.fullmatch(pattern, text)
    assert end.finish == "stop" or constraint.kind == "json_object"


async def test_an_output_in_a_grammar_goes_on_from_its_middle_as_it_would_have(driven: Driven) -> None:
    if "resumes_structured" not in driven.engine.serves:
        pytest.skip("the engine cannot")
    shape = StructuredOutput(kind="regex", value="([ab]{2}[0-9]){40}")
    for temperature in (0.0, 1.0):
        whole = request(f"whole {temperature}", [5, 6, 7], structured=shape, max_tokens=60, temperature=temperature, seed=7)
        driven.engine.add(whole)
        tokens = await driven.tokens(whole)
        for known in (1, 20, 59):
            name, epoch = f"resumed {temperature}", known
            more = {"structured": shape, "max_tokens": 60, "temperature": temperature, "seed": 7}
            resumed = request(name, [5, 6, 7], output=tokens[:known], epoch=epoch, **more)
            driven.engine.add(resumed)
            assert tokens[known:] == await driven.tokens(resumed), f"after {known} tokens"


async def test_outputs_with_and_without_a_grammar_are_in_a_batch_what_they_are_alone(driven: Driven) -> None:
    if "structured" not in driven.engine.serves:
        pytest.skip("the engine has none")
    shape = StructuredOutput(kind="regex", value="([ab]{2}[0-9]){40}")
    plain = {"max_tokens": 30, "temperature": 1.0, "seed": 3}
    wanted = [({"structured": shape} if number % 2 else {}) | plain | {"seed": number} for number in range(4)]
    adapters = [None, driven.adapters[0], driven.adapters[1], None]
    alone = []
    for number, (sampling, adapter) in enumerate(zip(wanted, adapters, strict=True)):
        one = request(f"alone {number}", [1, number + 2], adapter, **sampling)
        driven.engine.add(one)
        alone.append(await driven.tokens(one))
    together = [
        request(f"together {number}", [1, number + 2], adapter, **sampling)
        for number, (sampling, adapter) in enumerate(zip(wanted, adapters, strict=True))
    ]
    for one in together:
        driven.engine.add(one)
    found = [await driven.tokens(one) for one in together]
    if driven.resumes_sampled:  # tokens do not depend on the batch
        assert found == alone
    assert all(re.fullmatch("([ab]{2}[0-9])*[ab]{0,2}", driven.text(tokens)) for tokens in found[1::2])


async def test_a_request_is_cancelled_while_its_grammar_is_compiled(driven: Driven) -> None:
    if "structured" not in driven.engine.serves:
        pytest.skip("the engine has none")
    schema = json.dumps({"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(500)}})
    one = request("r", [1, 2], structured=StructuredOutput(kind="json", value=schema), max_tokens=200)
    driven.engine.add(one)
    driven.engine.cancel("r", 0)
    assert (await driven.ended(one)).finish == "cancelled"


async def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone(driven: Driven) -> None:
    if "structured" not in driven.engine.serves:
        pytest.skip("the engine has none")
    wrong = [
        request("regex", [1], structured=StructuredOutput(kind="regex", value="(")),
        request("grammar", [1], structured=StructuredOutput(kind="grammar", value="root := ::")),
        request("json", [1], structured=StructuredOutput(kind="json", value='{"type": "nothing"}')),
        request("choice", [1], structured=StructuredOutput(kind="choice", value="[]")),
        request("resumed", [1], output=[12], structured=StructuredOutput(kind="regex", value="a+")),
    ]
    right = request("right", [1, 2])
    for one in (*wrong, right):
        driven.engine.add(one)
    for one in wrong:
        error = (await driven.ended(one)).error
        assert error is not None and (error.code, error.param) == ("invalid_value", "structured_outputs"), one.request_id
    assert (await driven.ended(right)).finish == "length"


async def test_log_probabilities_of_the_prompt_are_those_of_drawing_it(driven: Driven) -> None:
    if "prompt_logprobs" not in driven.engine.serves:
        pytest.skip("the engine has none")
    for adapter in (None, driven.adapters[0]):
        drawn = request("drawn", [1, 2, 3], adapter, max_tokens=6, logprobs=2)
        driven.engine.add(drawn)
        tokens = await driven.tokens(drawn)
        scored = request("scored", [1, 2, 3, *tokens], adapter, max_tokens=3, prompt_logprobs=2)
        driven.engine.add(scored)
        await driven.ended(scored)
        first, *others = driven.items("scored")
        told = first.prompt_logprobs
        assert told is not None and all(item.prompt_logprobs is None for item in others)
        assert told[0] is None and len(told) == 3 + len(tokens)
        for given, again in zip([one for item in driven.items("drawn") for one in item.logprobs or []], told[3:], strict=True):
            assert again is not None and again.top_ids == given.top_ids
            assert again.logprob == pytest.approx(given.logprob, abs=1e-3)
        driven.reports.clear()


async def test_aborting_ends_everything_with_the_error_given(driven: Driven) -> None:
    requests = [request(f"r{i}", [1, i + 1], max_tokens=200) for i in range(6)]
    for one in requests:
        driven.engine.add(one)
    await eventually(lambda: driven.items("r0"))
    driven.engine.abort_all(WorkerLost("leaving"))
    for one in requests:
        end = await driven.ended(one)
        assert end.finish == "error" and end.error is not None and end.error.code == "worker_lost"


@pytest.mark.timeout(900)  # five cores start, one after another
async def test_a_request_that_kills_its_core_is_the_only_one_that_ends_of_it(driven: Driven) -> None:
    """The test submits lost requests again, as gateways do.

    vLLM's core dies of a token that its model does not have, which a worker would refuse.
    """
    if not isinstance(driven.engine, VllmEngine):
        pytest.skip("the engine is no process of its own")
    killer = request("killer", [driven.engine.core.vocab_size + 1000])
    others = [request(f"r{i}", [1, 2, 3 + i], driven.adapters[i % 2], max_tokens=60) for i in range(5)]

    async def serve(one: EngineRequest) -> EngineRequest:
        while True:
            driven.engine.add(one)
            await eventually(lambda key=(one.request_id, one.epoch): any(it.finish for it in driven.items(*key)), within_s=400)
            end = await driven.ended(one)
            tokens = [token for item in driven.items(one.request_id, one.epoch) for token in item.tokens]
            losses = 0 if tokens else one.losses
            if end.error is None or losses == LOSSES_MAX - 1:
                return replace(one, output=one.output + pack_tokens(tokens))
            assert end.error.code == "worker_lost"
            one = replace(one, epoch=one.epoch + 1, losses=losses + 1, output=one.output + pack_tokens(tokens))

    ended = await asyncio.gather(serve(killer), *(serve(one) for one in others))
    assert ended[0].losses == LOSSES_MAX - 1 and not ended[0].output
    assert [one.output_tokens for one in ended[1:]] == [60] * len(others)
    assert all(one.losses <= 2 for one in ended[1:])
    assert sum(report.output.failure is not None for report in driven.reports) == LOSSES_MAX, "cores that died"


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
    await driven.engine.check()
