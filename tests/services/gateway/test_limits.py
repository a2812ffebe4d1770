"""Promise: a tenant gets what its limits allow and a clear 429 beyond, as OpenAI's clients expect; others are not affected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from motet.services.gateway.config import GatewayConfig
from motet.services.gateway.tenants import limits as limits_module
from motet.services.gateway.tenants.limits import Limits, RateLimited, shown
from motet.shared.bus import Bus
from motet.shared.config import ConfigError
from motet.shared.errors import Overloaded
from motet.shared.model import Slo
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.support import Connect, FakeScheduler, assigned, running_gateway, start_workers
from tests.support import eventually


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(limits_module, "now_s", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def limits(inflight: int = 0, **options) -> Limits:
    return Limits(GatewayConfig.of(model="m", **options), lambda: inflight)


def test_without_limits_nothing_is_refused_and_nothing_is_said() -> None:
    free = limits()
    turns = [free.begin("a") for _ in range(1000)]
    assert turns[0].headers() == {}


def test_requests_per_second_flow_back_evenly(clock: Clock) -> None:
    four = limits(tenant_requests_per_s=4.0)
    for _ in range(4):
        four.begin("a").end()
    with pytest.raises(RateLimited) as refused:
        four.begin("a")
    assert refused.value.retry_after_s == pytest.approx(0.25)
    assert refused.value.openai().error.code == "rate_limit_exceeded"
    assert refused.value.openai().error.type == "requests"
    four.begin("b").end()  # another tenant has its own
    clock.now += 0.25
    turn = four.begin("a")
    assert turn.headers()["x-ratelimit-remaining-requests"] == "0"
    assert turn.headers()["x-ratelimit-limit-requests"] == "4" and turn.headers()["x-ratelimit-reset-requests"] == "1s"


def test_tokens_count_prompt_and_output_and_what_failed_is_given_back(clock: Clock) -> None:
    some = limits(tenant_tokens_per_min=600)
    turn = some.begin("a")
    turn.spend(400)
    turn.end(500)
    with pytest.raises(RateLimited) as refused:
        some.begin("a")
    assert refused.value.retry_after_s == pytest.approx(30.1)  # 301 tokens at 10 per second
    assert refused.value.openai().error.type == "tokens"
    failed = some.begin("b")
    failed.spend(600)
    failed.fail()
    failed.end(1000)  # it ends once
    assert some.begin("b").headers()["x-ratelimit-remaining-tokens"] == "600"


def test_requests_at_once_are_counted_until_they_end() -> None:
    two = limits(tenant_concurrent_requests=2)
    first, _ = two.begin("a"), two.begin("a")
    with pytest.raises(RateLimited, match="2 requests at once"):
        two.begin("a")
    first.end()
    two.begin("a")


def test_on_a_nearly_full_gateway_the_largest_tenant_gives_way() -> None:
    nearly = limits(inflight=90, max_inflight=100)
    for tenant in ("quiet", "other"):
        nearly.begin(tenant)
    with pytest.raises(Overloaded, match="share"):
        for _ in range(100):
            nearly.begin("loud")
    nearly.begin("quiet")


def test_a_file_gives_tenants_limits_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_text(json.dumps({"large": {"requests_per_s": 100, "weight": 4}}))
    mixed = limits(tenant_requests_per_s=1.0, tenant_tokens_per_min=50, tenant_limits_file=str(file))
    assert (mixed.of("large").requests_per_s, mixed.of("large").weight, mixed.of("large").tokens_per_min) == (100, 4, 50)
    assert mixed.of("any-other").requests_per_s == 1.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[]", "object"),
        ('{"a": {"weight": 0}}', "a: .*weight"),
        ('{"a": {"speed": 1}}', "a: .*speed"),
        ("{", "malformed|truncated"),
    ],
)
def test_a_wrong_file_stops_the_start_with_the_field_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "limits.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        limits(tenant_limits_file=str(file))


def test_durations_are_written_as_openai_writes_them() -> None:
    assert [shown(s) for s in (0.12, 1.0, 59.6, 360.0)] == ["120ms", "1s", "1m0s", "6m0s"]


# ---- over HTTP


@pytest.fixture
async def limited(connect: Connect, bus: Bus, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    workers = await start_workers(connect, "w1", "w2")
    scheduler = FakeScheduler(await connect("scheduler"), ["w1", "w2"])
    await scheduler.start()
    options = {"tenant_tokens_per_min": 60, "tenant_concurrent_requests": 1}
    async with running_gateway(nats_url, tmp_path, **options) as gateway:
        await eventually(lambda: not gateway.not_ready())
        yield Mesh(gateway, scheduler, workers, bus)


BODY = {"prompt": [5, 6, 7], "max_tokens": 4}


async def test_answers_say_what_is_left_and_refusals_when_to_come_back(limited: Mesh, http: aiohttp.ClientSession) -> None:
    limited.say("a b c")
    url = f"{limited.url}/v1/completions"
    async with http.post(url, json=BODY) as answer:
        assert answer.status == 200 and answer.headers["x-ratelimit-limit-tokens"] == "60"
        used = (await answer.json())["usage"]["total_tokens"]
        assert 60 - used <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= 61 - used
    async with http.post(url, json=BODY | {"stream": True}) as answer:
        assert answer.status == 200 and "x-ratelimit-remaining-tokens" in answer.headers
        await answer.read()
    limited.gateway.limits.begin("default").spend(1000)
    async with http.post(url, json=BODY) as answer:
        error = (await answer.json())["error"]
        assert answer.status == 429 and error["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1 and int(answer.headers["retry-after-ms"]) >= 1
        assert answer.headers["x-ratelimit-limit-tokens"] == "60"


async def test_a_stream_counts_until_its_client_has_it_or_has_gone(limited: Mesh, http: aiohttp.ClientSession) -> None:
    url = f"{limited.url}/v1/completions"
    async with http.post(url, json=BODY | {"stream": True}) as running:
        assert running.status == 200
        await assigned(limited.first)
        async with http.post(url, json=BODY) as refused:
            assert refused.status == 429 and "1 requests at once" in (await refused.json())["error"]["message"]
    limited.say("a")

    async def again() -> bool:
        async with http.post(url, json=BODY) as answer:
            return answer.status == 200

    await eventually(again)


async def test_a_request_carries_its_tenants_weight_to_the_scheduler(limited: Mesh, http: aiohttp.ClientSession) -> None:
    limited.say("a")
    async with http.post(f"{limited.url}/v1/completions", json=BODY) as answer:
        assert answer.status == 200
    assert limited.scheduler.submitted[0].tenant_weight == 1.0


@pytest.mark.parametrize(("max_tokens", "tpot_slo_ms"), [(1, 3_600_000.0), (2, 50.0)])
async def test_a_request_of_one_token_has_no_time_per_token(
    mesh: Mesh, http: aiohttp.ClientSession, max_tokens: int, tpot_slo_ms: float
) -> None:
    """Schedulers refuse new requests that would slow down such a request's neighbours."""
    asked = {"model": "demo", "prompt": [1, 2], "max_tokens": max_tokens}
    asking = asyncio.ensure_future(http.post(mesh.url + "/v1/completions", json=asked, headers={"x-slo-class": "interactive"}))
    request = await assigned(mesh.first)
    assert request.slo == Slo(slo_class="interactive", ttft_slo_ms=500.0, tpot_slo_ms=tpot_slo_ms)
    await mesh.first.emit(request, 0, [50], "length")
    assert (await asking).status == 200
