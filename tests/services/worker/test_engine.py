"""The engine's behaviour beyond right tokens: endings, queues, cancellation, adapters, failures of single requests."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from motet.kernels import PackedLora
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.engines.request import EngineRequest, StepOutput
from motet.services.worker.native.engine import Engine
from motet.shared.errors import InvalidAdapter, MotetError
from motet.shared.model import MODULES
from motet.shared.wire.stream import StreamItem
from tests.services.worker.support_engine import BLOCK_SIZE, make_engine, request, run
from tests.support_models import MAX_LEN, VOCAB, make_adapters, make_checkpoint, random_prompts

PROMPT = list(range(10, 31))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[HostAdapter]]:
    directory = tmp_path_factory.mktemp("engine")
    model_dir = make_checkpoint("llama2", directory)
    config = read_model_config(model_dir)
    return model_dir, [HostAdapter.from_blob(one.blob, config) for one in make_adapters(model_dir, directory)]


@pytest.fixture(scope="module")
def model_dir(checkpoint: tuple[Path, list[HostAdapter]]) -> Path:
    return checkpoint[0]


@pytest.fixture(scope="module")
def adapters(checkpoint: tuple[Path, list[HostAdapter]]) -> list[HostAdapter]:
    return checkpoint[1]


@pytest.fixture
def engine(model_dir: Path) -> Engine:
    return make_engine(model_dir)


def items_of(out: StepOutput, gateway_id: str = "g1") -> list[StreamItem]:
    return out.items.get(gateway_id, [])


def ended(out: StepOutput) -> list[str]:
    return [item.request_id for items in out.items.values() for item in items if item.finish is not None]


def greedy(model_dir: Path, count: int = 12, **sampling: Any) -> list[int]:
    return run(make_engine(model_dir), [request("a", PROMPT, max_tokens=count, **sampling)]).tokens["a"]


# ---- how a sequence ends


def test_max_tokens_ends_with_length(engine: Engine) -> None:
    result = run(engine, [request("a", PROMPT, max_tokens=5)])
    assert len(result.tokens["a"]) == 5
    assert result.last["a"].finish == "length" and result.last["a"].stop_token is None


def test_a_stop_token_ends_with_stop_and_is_the_last_token(model_dir: Path) -> None:
    answer = greedy(model_dir)
    stop = answer[4]
    result = run(make_engine(model_dir), [request("a", PROMPT, stop_token_ids=(stop,))])
    assert result.tokens["a"] == answer[: answer.index(stop) + 1]
    assert result.last["a"].finish == "stop" and result.last["a"].stop_token == stop


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_unless_it_is_ignored(engine: Engine, ignore_eos: bool) -> None:
    eos = 2
    result = run(engine, [request("a", PROMPT, ignore_eos=ignore_eos, logit_bias={eos: 100.0})])
    assert result.tokens["a"] == [eos] * (12 if ignore_eos else 1)
    assert result.last["a"].finish == ("length" if ignore_eos else "stop")


def test_nothing_ends_before_min_tokens(engine: Engine) -> None:
    result = run(engine, [request("a", PROMPT, ignore_eos=False, logit_bias={2: 100.0}, min_tokens=4)])
    tokens = result.tokens["a"]
    assert len(tokens) == 5 and tokens[-1] == 2 and 2 not in tokens[:4]


def test_the_context_ends_with_length(engine: Engine) -> None:
    prompt = [5] * (MAX_LEN - 3)
    result = run(engine, [request("a", prompt, max_tokens=100)])
    assert len(result.tokens["a"]) == 3 and result.last["a"].finish == "length"


def test_a_shorter_context_can_be_asked_for(model_dir: Path) -> None:
    engine = make_engine(model_dir, max_model_len=24)
    assert len(run(engine, [request("a", PROMPT, max_tokens=100)]).tokens["a"]) == 3


def test_the_context_is_never_longer_than_the_kv_cache(model_dir: Path) -> None:
    engine = make_engine(model_dir, kv_blocks=4)
    assert engine.max_model_len == 4 * BLOCK_SIZE
    assert len(run(engine, [request("a", PROMPT, max_tokens=100)]).tokens["a"]) == 4 * BLOCK_SIZE - len(PROMPT)


# ---- what is refused


def test_an_adapter_larger_than_the_device_memory_is_refused(model_dir: Path, adapters: list[HostAdapter]) -> None:
    engine = make_engine(model_dir, lora_bytes=64 << 10)
    with pytest.raises(InvalidAdapter, match="bytes on the device"):
        engine.add(request("a", PROMPT, adapters[3]), 0.0)


# ---- what a step reports


def test_items_are_sorted_by_gateway(engine: Engine) -> None:
    for name, gateway in (("a", "g1"), ("b", "g2"), ("c", "g1")):
        engine.add(request(name, PROMPT, gateway_id=gateway), 0.0)
    out = engine.step(0.0)
    assert {gateway: [item.request_id for item in items] for gateway, items in out.items.items()} == {
        "g1": ["a", "c"],
        "g2": ["b"],
    }


def test_the_first_item_says_how_long_it_waited_and_what_was_cached(engine: Engine) -> None:
    run(engine, [request("warm", PROMPT)])
    engine.add(replace(request("a", PROMPT), arrival_s=7.0), 7.0)
    first, second = items_of(engine.step(7.25))[0], items_of(engine.step(7.5))[0]
    assert first.queue_ms == pytest.approx(250.0)
    assert first.cached_tokens == 2 * BLOCK_SIZE
    assert second.queue_ms == 0 and second.cached_tokens == 0


def test_schedulers_hear_of_arrivals_starts_and_ends(model_dir: Path) -> None:
    engine = make_engine(model_dir, max_running=1)
    engine.add(request("a", PROMPT, max_tokens=2), 0.0)
    engine.add(request("b", PROMPT, max_tokens=2), 0.0)
    first = engine.step(0.0)
    assert {brief.request_id: brief.phase for brief in first.changed} == {"a": "running", "b": "waiting"}
    assert {brief.request_id: brief.phase for brief in engine.briefs()} == {"a": "running", "b": "waiting"}
    second, third = engine.step(0.0), engine.step(0.0)
    assert ended(second) == ["a"] and second.changed == []
    assert [(brief.request_id, brief.phase) for brief in third.changed] == [("b", "running")]


def test_of_a_request_of_one_token_schedulers_hear_the_end_alone(engine: Engine) -> None:
    engine.add(request("a", PROMPT, max_tokens=1), 0.0)
    out = engine.step(0.0)
    assert ended(out) == ["a"] and out.changed == []
    assert not engine.has_work()


def test_statistics_describe_the_step(engine: Engine, adapters: list[HostAdapter]) -> None:
    engine.add(request("a", PROMPT, adapters[0]), 0.0)
    engine.step(0.0)
    engine.add(request("b", PROMPT[:5], adapters[1]), 0.0)
    engine.add(request("c", PROMPT[:7]), 0.0)
    stats = engine.step(0.0).stats
    assert (stats.decode_rows, stats.prefill_requests, stats.prefill_tokens) == (1, 2, 12)
    assert (stats.distinct_adapters, stats.decode_rank_sum + stats.prefill_rank_sum) == (2, 12)
    assert max(stats.decode_max_rank, stats.prefill_max_rank) == 8
    assert (stats.adapters_loaded, stats.sampled, stats.running) == (1, 3, 3)
    assert (stats.context_tokens, stats.longest_context) == (len(PROMPT) + 1 + 12, max(len(PROMPT) + 1, 12))
    assert set(engine.clock.laps) == {"schedule", "load", "forward", "sample", "postprocess"}
    assert engine.clock.laps["forward"] > 0 and sum(engine.clock.laps.values()) == pytest.approx(engine.clock.step_s)


def test_logprobs_come_with_their_token(engine: Engine) -> None:
    result = run(engine, [request("a", PROMPT, logprobs=2, max_tokens=3), request("b", PROMPT, max_tokens=3)])
    for item in result.items["a"]:
        assert item.logprobs is not None
        (one,) = item.logprobs
        assert one.top_ids[0] == item.tokens[0] and one.logprob == one.top_logprobs[0] <= 0
    assert all(item.logprobs is None for item in result.items["b"])


# ---- cancellation


def test_cancelling_a_running_request_frees_it_within_the_step(engine: Engine) -> None:
    free = engine.kv_blocks_free
    engine.add(request("a", PROMPT), 0.0)
    engine.add(request("b", PROMPT[5:]), 0.0)
    engine.step(0.0)
    assert engine.cancel("a", epoch=0)
    out = engine.step(0.0)
    last = [item for item in items_of(out) if item.request_id == "a"]
    assert [(item.finish, item.index, item.tokens) for item in last] == [("cancelled", 1, [])]
    assert ended(out) == ["a"] and out.stats.decode_rows == 1
    engine.check()
    engine.cancel("b", epoch=0)
    assert engine.kv_blocks_free == free


def test_cancelling_a_waiting_request_takes_it_out_of_the_queue(model_dir: Path) -> None:
    engine = make_engine(model_dir, max_running=1)
    engine.add(request("a", PROMPT), 0.0)
    engine.add(request("b", PROMPT), 0.0)
    engine.step(0.0)
    assert engine.cancel("b", epoch=3)
    assert engine.step(0.0).stats.waiting == 0


def test_unknown_ids_and_newer_epochs_are_not_cancelled(engine: Engine) -> None:
    engine.add(request("a", PROMPT, epoch=2), 0.0)
    assert not engine.cancel("nobody", epoch=9)
    assert not engine.cancel("a", epoch=1)
    assert engine.has_work()


def test_aborting_ends_everything_with_the_error(engine: Engine, adapters: list[HostAdapter]) -> None:
    for i in range(3):
        engine.add(request(str(i), PROMPT, adapters[i]), 0.0)
    engine.step(0.0)
    out = engine.abort_all(MotetError("the end"))
    assert [(item.finish, item.error and item.error.message) for item in items_of(out)] == [("error", "the end")] * 3
    assert not engine.has_work()
    engine.check()


# ---- noise: sampled sequences repeat themselves


SAMPLED: dict[str, Any] = {"temperature": 1.1, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3}


def sampled_requests(adapters: list[HostAdapter]) -> list[EngineRequest]:
    return [
        request(str(i), prompt, adapters[i % 3] if i % 2 else None, seed=i, **SAMPLED)
        for i, prompt in enumerate(random_prompts(12, seed=5, longest=30))
    ]


def test_sampled_tokens_do_not_depend_on_batch_chunks_or_preemption(model_dir: Path, adapters: list[HostAdapter]) -> None:
    plain = run(make_engine(model_dir), sampled_requests(adapters))
    chunked = run(make_engine(model_dir, max_step_tokens=9), list(reversed(sampled_requests(adapters))), per_step=1)
    tight = run(make_engine(model_dir, kv_blocks=16), sampled_requests(adapters))
    assert tight.total("preempted") > 0
    assert chunked.tokens == tight.tokens == plain.tokens


def test_a_sampled_request_resumes_from_every_cut_as_if_uninterrupted(model_dir: Path) -> None:
    whole = run(make_engine(model_dir), [request("a", PROMPT, seed=9, min_tokens=6, **SAMPLED)]).tokens["a"]
    for cut in range(len(whole) + 1):
        resumed = run(make_engine(model_dir), [request("a", PROMPT, seed=9, min_tokens=6, output=whole[:cut], **SAMPLED)])
        assert resumed.tokens["a"] == whole, f"cut at {cut}"


def test_a_request_with_bans_resumes_from_every_cut_as_if_uninterrupted(model_dir: Path) -> None:
    free = greedy(model_dir, 12)
    bans: dict[str, Any] = {
        "bad_words": (tuple(free[:2]), tuple(free[3:6]), (free[7],)),
        "allowed_token_ids": tuple(range(5, VOCAB, 2)),
    }
    for sampling in ({"bad_words": bans["bad_words"]}, bans | SAMPLED | {"seed": 4}):
        whole = run(make_engine(model_dir), [request("a", PROMPT, max_tokens=12, ignore_eos=True, **sampling)]).tokens["a"]
        assert whole != free
        text = ",".join(map(str, whole)) + ","
        assert not any(",".join(map(str, word)) + "," in text for word in bans["bad_words"])
        for cut in range(len(whole) + 1):
            again = request("a", PROMPT, max_tokens=12, ignore_eos=True, output=whole[:cut], **sampling)
            assert run(make_engine(model_dir), [again]).tokens["a"] == whole, f"cut at {cut}"


def test_bans_that_leave_no_token_end_the_request_with_the_field(engine: Engine) -> None:
    done = run(engine, [request("a", PROMPT, max_tokens=4, allowed_token_ids=(5,), bad_words=((5, 5),)), request("b", PROMPT)])
    assert done.items["a"][-1].error is not None
    assert done.items["a"][-1].error.param == "bad_words"
    assert done.items["b"][-1].finish == "length"


def test_of_those_that_wait_the_one_with_the_smaller_priority_goes_first(model_dir: Path) -> None:
    engine = make_engine(model_dir, max_running=1)
    for name, priority in (("late", 2), ("later", 7), ("first", 0), ("second", 0), ("middle", 1)):
        engine.add(msgspec.structs.replace(request(name, PROMPT, max_tokens=1), priority=priority), 0.0)
    order: list[str] = []
    while engine.has_work():
        order += [item.request_id for item in items_of(engine.step(0.0))]
        engine.check()
    assert order == ["first", "second", "middle", "late", "later"]


def test_a_resumed_request_that_had_ended_already_says_so(engine: Engine) -> None:
    for name, output, changes in (
        ("length", [5, 6, 7], {"max_tokens": 3}),
        ("stop", [5, 2], {"ignore_eos": False}),
    ):
        engine.add(request(name, PROMPT, output=output, **changes), 0.0)
        assert engine.has_work()
        (item,) = items_of(engine.step(0.0))
        assert (item.finish, item.index, item.tokens) == (name, len(output), [])
        assert item.stop_token == (2 if name == "stop" else None)
        assert not engine.has_work()


def test_choices_of_one_prompt_share_its_blocks_in_the_same_step(engine: Engine, model_dir: Path) -> None:
    result = run(engine, [request(str(seed), PROMPT, seed=seed, temperature=1.0) for seed in range(4)])
    assert result.steps[0].prefill_requests == 4
    assert [result.first[str(seed)].cached_tokens for seed in range(4)] == [0, 16, 16, 16]
    assert len({tuple(tokens) for tokens in result.tokens.values()}) == 4
    alone = run(make_engine(model_dir), [request("3", PROMPT, seed=3, temperature=1.0)])
    assert alone.tokens["3"] == result.tokens["3"]


# ---- adapters


def test_adapters_and_their_versions_never_share_cached_prompts(engine: Engine, adapters: list[HostAdapter]) -> None:
    reloaded = dataclasses.replace(adapters[0], digest="the-next-version")
    result = run(
        engine,
        [
            request("a", PROMPT, adapters[0]),
            request("b", PROMPT, adapters[1]),
            request("c", PROMPT, reloaded),
            request("d", PROMPT),
        ],
        per_step=1,
    )
    assert all(item.cached_tokens == 0 for item in result.first.values())
    again = run(engine, [request("a", PROMPT, adapters[0]), request("c", PROMPT, reloaded)])
    assert all(item.cached_tokens == 16 for item in again.first.values())


def test_residency_is_reported_when_adapters_come_and_go(model_dir: Path, adapters: list[HostAdapter]) -> None:
    engine = make_engine(model_dir, max_loras=1)
    free = engine.adapter_bytes_free
    engine.add(request("a", PROMPT, adapters[0], max_tokens=1), 0.0)
    engine.add(request("b", PROMPT, adapters[1], max_tokens=1), 0.0)
    first, second = engine.step(0.0), engine.step(0.0)
    assert [(change.digest, change.tier) for change in first.residency] == [(adapters[0].digest, "device")]
    assert [(change.digest, change.tier) for change in second.residency] == [
        (adapters[0].digest, None),
        (adapters[1].digest, "device"),
    ]
    (resident,) = engine.residency()
    assert (resident.digest, resident.rank, resident.tier) == (adapters[1].digest, adapters[1].rank, "device")
    assert engine.adapter_bytes_free == free - resident.size_bytes


def test_prefetching_fills_free_room_and_evicts_nothing(model_dir: Path, adapters: list[HostAdapter]) -> None:
    engine = make_engine(model_dir, max_loras=1)
    assert engine.load_adapter(adapters[0]) and engine.load_adapter(adapters[0])
    assert not engine.load_adapter(adapters[1])
    assert engine.has_work()
    assert [change.digest for change in engine.step(0.0).residency] == [adapters[0].digest]
    result = run(engine, [request("a", PROMPT, adapters[0])])
    assert result.total("adapters_loaded") == 0
    engine.check()


def test_an_idle_adapter_is_unloaded_at_once_and_a_used_one_when_its_last_request_ends(
    engine: Engine, adapters: list[HostAdapter]
) -> None:
    engine.load_adapter(adapters[0])
    assert engine.unload_adapter(adapters[0].digest)
    assert engine.unload_adapter("never seen")
    engine.add(request("a", PROMPT, adapters[1], max_tokens=2), 0.0)
    engine.step(0.0)
    assert not engine.unload_adapter(adapters[1].digest)
    assert [resident.digest for resident in engine.residency()] == [adapters[1].digest]
    out = engine.step(0.0)
    assert ended(out) == ["a"]
    assert [(change.digest, change.tier) for change in out.residency] == [(adapters[1].digest, None)]
    assert engine.residency() == []
    engine.check()


# ---- failures


def neighbours(model_dir: Path, adapters: list[HostAdapter]) -> tuple[list[EngineRequest], dict[str, list[int]]]:
    requests = [request("base", PROMPT[2:]), request("well", PROMPT[3:], adapters[0])]
    return requests, run(make_engine(model_dir), requests).tokens


def finishes(out: StepOutput) -> dict[str, str | None]:
    return {item.request_id: item.finish for items in out.items.values() for item in items}


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_only(model_dir: Path, adapters: list[HostAdapter]) -> None:
    requests, expected = neighbours(model_dir, adapters)
    engine = make_engine(model_dir)
    a = torch.zeros(3, 5)
    small = PackedLora.pack({(0, "q_proj"): (1.0, a, a.T)}, dict.fromkeys(MODULES, (5, 5)), layers=1)
    bad = dataclasses.replace(adapters[1], digest="bad", packed=small)
    for one in (request("bad-1", PROMPT, bad), *requests, request("bad-2", PROMPT, bad)):
        engine.add(one, 0.0)
    out = engine.step(0.0)
    assert finishes(out) == {"bad-1": "error", "bad-2": "error", "base": None, "well": None}
    assert "bad" not in {resident.digest for resident in engine.residency()}
    engine.check()
    tokens = {name: [item.tokens[0] for item in items_of(out) if item.request_id == name] for name in expected}
    while engine.has_work():
        for item in items_of(engine.step(0.0)):
            tokens[item.request_id] += item.tokens
    assert tokens == expected


def test_logits_that_are_not_numbers_fail_their_own_request_only(model_dir: Path, adapters: list[HostAdapter]) -> None:
    requests, expected = neighbours(model_dir, adapters)
    engine = make_engine(model_dir)
    packed = dataclasses.replace(adapters[1].packed, arena=adapters[1].packed.arena * math.nan)
    nan = dataclasses.replace(adapters[1], digest="nan", packed=packed)
    result = run(engine, [request("nan", PROMPT, nan), *requests, request("sampled", PROMPT, nan, temperature=1.0)])
    for name in ("nan", "sampled"):
        assert result.last[name].finish == "error" and result.tokens[name] == []
        error = result.last[name].error
        assert error is not None and "not finite" in error.message
    assert {name: result.tokens[name] for name in expected} == expected


def test_a_failed_forward_pass_fails_its_batch_and_not_the_engine(
    model_dir: Path, adapters: list[HostAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, expected = neighbours(model_dir, adapters)
    engine = make_engine(model_dir, max_running=2)
    run(engine, [request("earlier", PROMPT)])
    for one in (request("x", PROMPT), request("y", PROMPT, adapters[2]), request("later", PROMPT)):
        engine.add(one, 0.0)

    def fail(_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", fail)
        out = engine.step(0.0)
    assert finishes(out) == {"x": "error", "y": "error"}
    assert isinstance(out.failure, RuntimeError)
    engine.check()
    assert [brief.request_id for brief in engine.briefs()] == ["later"]
    first = items_of(engine.step(0.0))[0]
    assert first.request_id == "later" and first.cached_tokens == 0, "what the failed step was to write must not be reused"
    engine.cancel("later", 0)
    engine.step(0.0)
    assert run(engine, requests).tokens == expected
