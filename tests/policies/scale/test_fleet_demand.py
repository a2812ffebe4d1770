"""Promise: what all schedulers are asked for is known to each of them, every request counted once, within bounded memory."""

from __future__ import annotations

import pytest

import motet.policies.scale.fleet_demand as fleet_demand
from motet.policies.scale.fleet_demand import FORGET_S, REPORT_S, SHARES_S, SILENT_S, WINDOW_S, FleetDemand, Tally
from motet.shared.bus import decode, encode
from motet.shared.model import AdapterRef
from motet.shared.wire.demand import DemandReport

A, B = (AdapterRef(name=name, digest=name * 8, rank=rank, size_bytes=rank * 1000) for name, rank in (("a", 8), ("b", 64)))


def ask(tally: Tally, request_id: str, *adapters: AdapterRef, refused: bool = False, base: str = "base") -> None:
    tally.asked(base, request_id, adapters, prompt_tokens=100, output_tokens=20, refused=refused)


def heard(*tallies: Tally, at_s: float) -> FleetDemand:
    """What a scheduler knows after a report of each of these."""
    fleet = FleetDemand()
    for number, tally in enumerate(tallies):
        fleet.hear(tally.report(f"s{number}", at_s), at_s)
    return fleet


def test_rates_are_those_of_all_schedulers_together() -> None:
    tallies = Tally(0.0), Tally(0.0)
    for number, tally in enumerate(tallies):
        for i in range(20):
            ask(tally, f"{number}-{i}", A if i % 4 else B, refused=i < 5)
    (rates,) = heard(*tallies, at_s=10.0).rates(10.0).values()
    assert (rates.requests_s, rates.refused_s) == (4.0, 1.0)
    assert (rates.prompt_tokens_s, rates.output_tokens_s) == (400.0, 80.0)
    shares = {digest: (one.share, one.rank, one.size_bytes) for digest, one in rates.adapters.items()}
    assert shares == {A.digest: (0.75, 8, 8000), B.digest: (0.25, 64, 64000)}


def test_a_durable_request_that_waits_for_room_counts_once() -> None:
    tally = Tally(0.0)
    for _ in range(3):
        ask(tally, "waits", A, refused=True)
    ask(tally, "waits", A)
    ask(tally, "other", A)
    (rates,) = heard(tally, at_s=REPORT_S).rates(REPORT_S).values()
    assert (rates.requests_s * REPORT_S, rates.refused_s * REPORT_S) == (2, 1)
    ask(tally, "waits", A)
    assert tally.report("s", 9.0).bases["base"].adapters[A.digest].requests == 1, "once it has run, its id may come again"


def test_a_report_begins_where_the_last_one_ended_and_survives_its_message() -> None:
    tally = Tally(0.0)
    ask(tally, "r1")
    ask(tally, "r2", A, B, base="images")
    first = tally.report("s", 5.0)
    assert decode(encode(first), DemandReport) == first and first.seconds == 5.0
    assert first.bases["base"].adapters[""].requests == 1
    assert {digest: one.requests for digest, one in first.bases["images"].adapters.items()} == {A.digest: 1, B.digest: 1}
    assert tally.report("s", 11.0) == DemandReport(scheduler_id="s", seconds=6.0)


def test_rates_follow_the_last_half_minute_and_shares_the_last_minutes() -> None:
    fleet, tally = FleetDemand(), Tally(0.0)
    at_s = 0.0
    for adapter, periods in ((A, 40), (B, 12)):
        for _ in range(periods):
            at_s += REPORT_S
            for i in range(10):
                ask(tally, f"{at_s}-{i}", adapter)
            fleet.hear(tally.report("s", at_s), at_s)
    (rates,) = fleet.rates(at_s).values()
    assert rates.requests_s == 2.0
    assert 0.5 < rates.adapters[A.digest].share < 0.77, "older requests count less than their 0.77 of all"
    (later,) = fleet.rates(at_s + WINDOW_S).values()
    assert later.requests_s == 0.0 and later.adapters[A.digest].share == pytest.approx(rates.adapters[A.digest].share)
    assert fleet.rates(at_s + 20 * SHARES_S) == {}


def test_a_scheduler_that_says_nothing_is_missing_until_it_is_forgotten_unless_it_said_good_bye() -> None:
    fleet = FleetDemand()
    for name in ("dies", "leaves", "stays"):
        fleet.hear(DemandReport(scheduler_id=name, seconds=5.0), 0.0)
    fleet.hear(DemandReport(scheduler_id="leaves", seconds=1.0, leaving=True), 1.0)
    for at_s in (5.0, 10.0, 15.0):
        fleet.hear(DemandReport(scheduler_id="stays", seconds=5.0), at_s)
    assert fleet.missing(SILENT_S) == [] and fleet.missing(15.0) == ["dies"]
    assert fleet.schedulers(15.0) == ["dies", "stays"]
    fleet.hear(DemandReport(scheduler_id="stays", seconds=45.0), FORGET_S)
    assert fleet.missing(FORGET_S + 1.0) == [] and fleet.schedulers(FORGET_S + 1.0) == ["stays"]


def test_memory_is_bounded_and_what_has_no_place_counts_in_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_demand, "ADAPTERS_MAX", 10)
    monkeypatch.setattr(fleet_demand, "REFUSED_MAX", 10)
    fleet, tally = FleetDemand(), Tally(0.0)
    for period in range(1, 4):
        for i in range(50):
            name = f"{period}-{i}" if i else "hot"
            for n in range(3 if i == 0 else 1):
                one = AdapterRef(name=name, digest=name, rank=8, size_bytes=1)
                ask(tally, f"{name}-{period}-{n}", one, refused=True)
        report = tally.report("s", period * REPORT_S)
        assert len(report.bases["base"].adapters) == 10 and report.bases["base"].rest.requests == 40
        fleet.hear(report, period * REPORT_S)
    (rates,) = fleet.rates(3 * REPORT_S).values()
    assert rates.requests_s == pytest.approx(3 * 52 / 15.0)
    assert len(rates.adapters) == 10 and max(rates.adapters, key=lambda digest: rates.adapters[digest].share) == "hot"
