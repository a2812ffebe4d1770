"""Promise: messages are typed, bounded and their failures are typed too; a lost broker is not a lost process."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from motet.shared import subjects
from motet.shared.bus import Bus, decode
from motet.shared.config import BusConfig
from motet.shared.errors import BadRequest, DeadlineExceeded, ErrorInfo, Overloaded, TooLarge, Unavailable, from_info
from motet.shared.leases import LeaseHolder, LeaseWatch
from motet.shared.wire.prediction import Outcome, Prediction, PredictRequest
from motet.shared.wire.refusal import Refused
from tests.shared.relay import recorded
from tests.support import eventually

ASK = PredictRequest(adapter_digest="", prompt_tokens=3, max_tokens=9)


async def test_a_request_is_answered_with_the_declared_type(bus, connect):
    server = await connect("predictor-1")

    async def answer(ask: PredictRequest) -> Prediction:
        return Prediction(p50_tokens=ask.prompt_tokens, p90_tokens=ask.max_tokens, samples=1)

    await server.serve("predict", subjects.PREDICT, PredictRequest, answer, queue="predictor")
    reply = await bus.request(subjects.PREDICT, ASK, Prediction | Refused, timeout_s=2)
    assert reply == Prediction(p50_tokens=3, p90_tokens=9, samples=1)


async def test_a_server_is_known_to_the_broker_when_serve_returns(nats_url):
    async with recorded(nats_url) as (url, sent):
        bus = await Bus.connect(BusConfig(nats_url=url), "predictor-1")

        async def unasked(_: PredictRequest) -> Prediction:
            raise AssertionError("unreachable")

        await bus.serve("predict", subjects.PREDICT, PredictRequest, unasked, queue="predictor")
        asked, confirmed = sent.rfind(b"SUB " + subjects.PREDICT.encode()), sent.rfind(b"PING")
        assert 0 <= asked < confirmed, "the PING whose PONG we waited for went out behind the subscription"
        await bus.close()


async def test_a_subject_without_listener_is_unavailable_at_once(bus):
    with pytest.raises(Unavailable, match="no service answers"):
        await bus.request(subjects.PREDICT, ASK, Prediction, timeout_s=5)


async def test_a_slow_answer_is_a_deadline_and_a_typed_error_survives_the_wire(bus, connect):
    server = await connect("predictor-1")

    async def slow(_: PredictRequest) -> Prediction:
        await asyncio.sleep(30)  # time: longer than the deadline of who asks
        raise AssertionError("unreachable")

    async def busy(_: PredictRequest) -> Prediction:
        raise Overloaded("queue full", retry_after_s=2.5)

    await server.serve("slow", "t.slow", PredictRequest, slow, queue="q")
    await server.serve("busy", "t.busy", PredictRequest, busy, queue="q")
    with pytest.raises(DeadlineExceeded):
        await bus.request("t.slow", ASK, Prediction | Refused, timeout_s=0.1)
    reply = await bus.request("t.busy", ASK, Prediction | Refused, timeout_s=2)
    error = from_info(reply.error)
    assert isinstance(error, Overloaded) and error.retry_after_s == 2.5 and error.status == 429


async def test_beyond_its_concurrency_a_server_refuses_instead_of_queueing(bus, connect):
    server = await connect("predictor-1")
    taken, release = asyncio.Event(), asyncio.Event()

    async def wait(_: PredictRequest) -> Prediction:
        taken.set()
        await release.wait()
        return Prediction(p50_tokens=1, p90_tokens=1, samples=0)

    await server.serve("wait", "t.wait", PredictRequest, wait, queue="q", concurrency=1)
    first = asyncio.ensure_future(bus.request("t.wait", ASK, Prediction | Refused, timeout_s=5))
    await asyncio.wait_for(taken.wait(), timeout=5)
    reply = await bus.request("t.wait", ASK, Prediction | Refused, timeout_s=5)
    assert isinstance(reply, Refused) and reply.error.code == "overloaded"
    release.set()
    assert isinstance(await first, Prediction)


async def test_an_answer_of_any_size_gets_an_answer(bus, connect):
    server = await connect("predictor-1")

    async def wordy(_: PredictRequest) -> Prediction:
        raise BadRequest("wrong: " + "x" * (bus.max_payload + 1))

    async def huge(_: PredictRequest) -> Refused:
        return Refused(error=ErrorInfo(code="overloaded", message="x" * (bus.max_payload + 1)))

    await server.serve("wordy", "t.wordy", PredictRequest, wordy, queue="q")
    await server.serve("huge", "t.huge", PredictRequest, huge, queue="q")
    for subject, code in (("t.wordy", "invalid_value"), ("t.huge", "request_too_large")):
        reply = await bus.request(subject, ASK, Prediction | Refused, timeout_s=5)
        assert isinstance(reply, Refused) and reply.error.code == code and len(reply.error.message) < 3000
    assert bus.connected and server.connected


async def test_what_is_larger_than_a_message_may_be_is_never_sent(bus):
    with pytest.raises(TooLarge):
        await bus.publish_encoded("t.any", b"x" * (bus.max_payload + 1))
    with pytest.raises(TooLarge):  # the headers count
        await bus.store(subjects.dead("acme"), b"x" * bus.max_payload, {"Motet-Reason": "too much"})
    with pytest.raises(TooLarge):
        ask = ErrorInfo(code="x", message="x" * (bus.max_payload + 1))
        await bus.request("t.any", ask, Prediction, timeout_s=1)
    await bus.flush()
    assert bus.connected


async def test_a_connection_that_the_server_ends_for_good_is_known_to_be_lost(bus):
    assert bus.lost == ""
    await bus.nc.publish("t.any", b"x" * bus.max_payload, headers={"and": "a header"})
    await eventually(lambda: "maximum payload" in bus.lost)
    assert not bus.connected


async def test_a_client_that_gave_up_reconnecting_is_known_to_be_lost(bus, nats_server, monkeypatch):
    async def broken(_: object) -> None:
        raise ValueError("an unexpected answer")

    monkeypatch.setattr(bus.nc, "_connect_to_server", broken)  # private: the library fails so at no time of our choice
    nats_server.kill()
    await eventually(lambda: "unexpected answer" in bus.lost)


async def test_closing_is_no_loss(bus, connect):
    other = await connect("other")
    await other.close()
    assert other.lost == ""


@pytest.mark.parametrize("data", [b"\xc1 nothing", b"\x81\xaeadapter_digest\xa1\xff", b"\x81\xa1x" + b"\x91" * 100_000])
def test_bytes_that_are_no_message_are_one_kind_of_error(data: bytes) -> None:
    """msgspec raises different errors for strings that are not UTF-8 and for deep nesting."""
    with pytest.raises(msgspec.DecodeError):
        decode(data, Outcome)


async def test_an_undecodable_message_is_dropped_and_the_next_one_still_arrives(bus):
    seen: list[Outcome] = []
    await bus.subscribe("t.out", Outcome, seen.append)
    await bus.nc.publish("t.out", b"\xc1 not msgpack")
    await bus.publish("t.out", Outcome(adapter_digest="d", prompt_tokens=1, output_tokens=2))
    await eventually(lambda: len(seen) == 1)


async def test_after_a_reconnection_the_bus_is_connected_once_the_server_knows_its_subscriptions(bus, nats_server, monkeypatch):
    flush, go_on = bus.nc.flush, asyncio.Event()

    async def held_up(*args) -> None:
        """The last action of a reconnection: subscriptions are sent, and the answer shows that they have arrived."""
        await go_on.wait()
        await flush(*args)

    monkeypatch.setattr(bus.nc, "flush", held_up)
    nats_server.kill()
    await eventually(lambda: not bus.connected)
    await nats_server.start()
    await eventually(lambda: bus.nc.is_connected, within_s=15)
    assert not bus.connected
    go_on.set()
    await eventually(lambda: bus.connected)


async def test_a_lease_ends_with_goodbye_restart_or_silence_but_not_with_the_broker(bus, connect, nats_server):
    lost: list[str] = []
    watcher = await connect("gateway-1")
    watch = LeaseWatch(watcher, "worker", lost.append)
    buses = {name: await connect(f"worker-{name}") for name in ("polite", "silent")}
    holders = {name: LeaseHolder(one, "worker", name, "first") for name, one in buses.items()}
    for holder in holders.values():
        await holder.start()
    await watch.start()
    witness = LeaseHolder(await connect("gateway-2"), "gateway", "witness", "first")
    await witness.start()
    assert sorted(watch.ids()) == ["polite", "silent"]

    nats_server.kill()
    await eventually(lambda: not watcher.connected)
    await nats_server.start()
    await eventually(lambda: watcher.connected and all(one.connected for one in buses.values()), within_s=15)
    assert lost == [] and sorted(watch.ids()) == ["polite", "silent"]

    await holders["polite"].release()
    await eventually(lambda: lost == ["polite"])
    await buses["silent"].close()
    await eventually(lambda: lost == ["polite", "silent"], within_s=10)
