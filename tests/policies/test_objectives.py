"""Promise: a request that no worker would serve in time is refused at once, with the time until one would."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from bench.rivals import POLICIES
from motet.policies.cluster import objectives
from motet.policies.cluster.cluster_state import ClusterState
from motet.policies.cluster.dispatch import Decision, decide
from motet.shared.model import PictureBrief, RequestBrief
from tests.policies.test_dispatch import ask, cluster
from tests.support_worker import PERF, worker_limits

INTERACTIVE, STANDARD, BATCH = 500.0, 2000.0, 60_000.0
L = 100.0  # average response length


def fill(
    state: ClusterState,
    worker_id: str,
    running: int,
    waiting: int = 0,
    *,
    ttft: float = STANDARD,
    tpot: float = 200.0,
    tenant: str = "",
    weight: float = 1.0,
) -> None:
    for number in range(running + waiting):
        phase = "running" if number < running else "waiting"
        name = f"{worker_id}-{tenant}-{ttft:g}-{len(state.requests(worker_id))}"
        state.put_request(worker_id, RequestBrief(name, 0, "", 0, 50, 0, 100, phase, tpot, ttft, tenant, weight))


def asked(ttft: float = STANDARD, **more):
    return ask(adapter="", rank=0, ttft_slo_ms=ttft, **more)


def admit(state: ClusterState, request, policy: str = "motet", admission="objective") -> Decision:
    chooser = POLICIES[policy]()
    return decide(chooser, state, request, 0.0, stale_s=3.0, avg_resp_len=L, admission=admission)


@pytest.fixture
def full() -> ClusterState:
    """One worker whose 8 seats are taken and where 40 standard requests wait. A seat becomes free about every 154 ms."""
    state = cluster("a", max_running=8)
    fill(state, "a", 8, 40)
    return state


def test_a_request_that_would_wait_too_long_is_refused_with_the_time_until_it_would_not(full):
    refused = admit(full, asked())
    assert refused.worker_id is None and refused.candidates == 1 and refused.screening is None
    # 41 turns of 100 * (10 + 8 * (0.2 + 9 / 100)) / 8 ms, its prefill, 1.5 steps of 11.6 ms, less the 1.4 s that it may wait
    assert refused.late_s == pytest.approx((41 * 154.0 + 9.0 + 1.5 * 11.6 - 1400.0) / 1000)
    assert admit(full, asked(), admission="room").worker_id == "a"


@pytest.mark.parametrize("kernel", ["mbgmv", "bgmv"])
def test_the_time_until_the_objectives_are_met_is_that_of_the_formula(kernel):
    """Of 6 seats 3 are taken by urgent and 1 by standard requests; 4 standard and 2 patient ones wait. Answers have 100 tokens.

    A step has 6 rows, of rank 16 with padding, else of the mean rank. The patient requests run after this one.
    """
    limits = worker_limits(max_running=6, copies="wait")
    perf = msgspec.structs.replace(PERF, kernel=kernel, decode_lora_ms=0.1, prefill_lora_ms=0.3, fetch_base_ms=7.0)
    state = ClusterState()
    state.put_worker("a", limits, perf)
    state.heard("a", 0.0, kv_blocks_free=400, draining=False)
    kinds = [("running", 16, INTERACTIVE)] * 3 + [("running", 0, STANDARD)] + [("waiting", 8, STANDARD)] * 4
    for number, (phase, rank, ttft) in enumerate([*kinds, *[("waiting", 0, BATCH)] * 2]):
        state.put_request("a", RequestBrief(f"r{number}", 0, "", rank, 50, 0, 100, phase, 900.0, ttft))
    request = ask(rank=8, tokens=80, ttft_slo_ms=STANDARD, tpot_slo_ms=900.0)
    rank = 16 if kernel == "bgmv" else (3 * 16 + 4 * 8 + 8) / 11
    prompt = (6 * 50 + 80) / 7
    row = 0.2 + 0.1 * rank
    row_tpot = row + (4 + 0.1 * prompt + 0.3 * rank) / L
    turn = L * (10 + 6 * row_tpot) / 6
    own = 4 + 0.1 * 80 + 0.3 * 8 + (1 + 0.5 * 8) + 7.0
    free = 6 - 4
    seat = (4 + 1 - free) * turn / (1 - 3 / (4 + 1))
    joining = free / 4 * 200 * 0.1
    ttft = seat + joining + own + 1.5 * (10 + 6 * row)
    rows, late = objectives.late_ms(state, request, np.array([True] + [False] * 15), 0.0, L)
    assert rows.tolist() == [state.row("a")]
    assert late[0] == pytest.approx(ttft - 0.7 * STANDARD)


def test_a_request_for_an_adapter_that_would_wait_for_a_slot_is_refused_and_one_for_an_adapter_in_use_is_not():
    """Each of 4 slots holds the adapter of a running request; a slot becomes free 4 times in the time of an answer."""
    state = cluster("a", max_running=64, adapter_slots=4)
    for number in range(4):
        state.put_request("a", RequestBrief(f"r{number}", 0, f"d{number}", 8, 50, 0, 4000, "running", 900.0, BATCH))
    state.replace_adapters("a", {f"d{number}": "device" for number in range(4)})
    used, other = (ask(adapter=name, ttft_slo_ms=STANDARD, tpot_slo_ms=900.0) for name in ("d3", "d4"))
    assert admit(state, used).worker_id == "a"
    refused = admit(state, other)
    assert refused.worker_id is None
    assert refused.late_s > 4000 * 10 / 1000 / 4 - STANDARD / 1000, "a quarter of what the running requests still need"


def test_a_refused_request_is_admitted_after_the_time_it_was_told_and_not_long_before(full):
    def after(seconds: float) -> Decision:
        """The same worker after `seconds`, in which as many requests have ended as it predicted."""
        state = cluster("a", max_running=8)
        fill(state, "a", 8, 40 - int(seconds / 0.154))
        return admit(state, asked())

    told_s = admit(full, asked()).late_s
    assert after(told_s + 0.2).worker_id == "a"
    assert after(told_s * 0.7).worker_id is None


def test_the_more_urgent_request_overtakes_and_is_admitted_where_a_less_urgent_one_is_not(full):
    assert admit(full, asked(INTERACTIVE)).worker_id == "a"
    assert admit(full, asked(STANDARD)).worker_id is None


def test_a_patient_request_that_others_keep_overtaking_is_not_promised_a_place():
    state = cluster("a", max_running=8, max_waiting=400)
    fill(state, "a", 8, ttft=INTERACTIVE)
    fill(state, "a", 0, 100, ttft=BATCH)
    assert admit(state, asked(BATCH)).worker_id is None
    calm = cluster("a", max_running=8, max_waiting=400)
    fill(calm, "a", 8, 100, ttft=BATCH)
    assert admit(calm, asked(BATCH)).worker_id == "a"


def test_patient_requests_leave_the_last_places_to_urgent_ones():
    state = cluster("a", max_running=8, max_waiting=16)
    fill(state, "a", 8, 12, ttft=BATCH)
    assert admit(state, asked(BATCH)).worker_id is None
    assert admit(state, asked(INTERACTIVE)).worker_id == "a"


def test_of_several_workers_one_that_keeps_the_objectives_takes_it_whatever_the_policy_prefers(full):
    full.put_worker("b", worker_limits(max_running=8), PERF)
    full.heard("b", 0.0, kv_blocks_free=512, draining=False)
    for policy in POLICIES:
        assert {admit(full, asked(key=n), policy).worker_id for n in range(20)} == {"b"}, policy


def test_a_time_per_token_that_no_worker_keeps_is_a_reason_too():
    state = cluster("a")
    fill(state, "a", 40)  # 10 + 0.2 * 40 ms per step
    assert admit(state, asked(tpot_slo_ms=15.0)).worker_id is None
    assert admit(state, asked(tpot_slo_ms=40.0)).worker_id == "a"


def test_a_newcomer_does_not_break_the_time_per_token_of_those_that_are_there():
    state = cluster("a")
    fill(state, "a", 10, tpot=16.0)  # 12.9 ms per token with 10, and 12 ms is what a batch request may bring it to
    assert admit(state, asked(BATCH, tpot_slo_ms=2000.0)).worker_id is None
    relaxed = cluster("a")
    fill(relaxed, "a", 10, tpot=200.0)
    assert admit(relaxed, asked(BATCH, tpot_slo_ms=2000.0)).worker_id == "a"


def test_an_objective_that_cannot_be_kept_at_all_refuses_no_request():
    state = cluster("a")
    fill(state, "a", 10)
    assert admit(state, asked(tpot_slo_ms=5.0)).worker_id == "a"  # a step takes 10 ms alone
    assert admit(state, asked(ttft=1.0)).worker_id == "a"


def test_a_request_that_lost_its_worker_is_never_refused_for_its_objectives(full):
    assert admit(full, asked(begun=True)).worker_id == "a"


def test_what_a_large_cluster_refuses_is_looked_at_on_a_bounded_number_of_workers():
    state = cluster(*(f"w{n}" for n in range(200)), max_running=2)
    for n in range(200):
        fill(state, f"w{n}", 2, 40 if n else 30)
    assert admit(state, asked()).worker_id is None
    least = admit(state, asked()).late_s
    state.drop_worker("w0")
    assert admit(state, asked()).late_s > least  # the roomiest one is among those


# ---- tenants


def test_a_tenant_above_its_share_is_refused_before_those_below_theirs():
    state = cluster("a", max_running=8)
    fill(state, "a", 8, tenant="loud")
    fill(state, "a", 0, 3, tenant="loud")
    fill(state, "a", 0, 1, tenant="quiet")
    assert admit(state, asked(tenant="loud")).worker_id is None
    assert admit(state, asked(tenant="quiet")).worker_id == "a"


def test_a_tenant_below_its_share_is_not_put_off_because_of_what_another_one_runs():
    state = cluster("a", max_running=8, max_waiting=400)
    fill(state, "a", 8, 2, ttft=INTERACTIVE, tenant="loud")
    fill(state, "a", 0, 4, ttft=10_000.0, tenant="quiet")
    assert admit(state, asked(10_000.0, tenant="quiet")).worker_id == "a"
    assert admit(state, asked(10_000.0, tenant="loud")).worker_id is None


def test_a_quiet_tenant_with_a_few_requests_at_once_is_not_taken_for_a_loud_one():
    """Admission limits the loud tenant, so that it holds no more requests than the quiet ones.

    Only their recent demand differs.
    """
    state = cluster("a", max_running=8)
    fill(state, "a", 4, tenant="loud")
    fill(state, "a", 4, tenant="quiet")
    fill(state, "a", 0, 2, ttft=BATCH, tenant="third")
    for tenant, demand, taken in (("quiet", 0.3, True), ("loud", 3.0, False)):
        decision = admit(state, asked(BATCH, tenant=tenant, demand=demand, largest_demand=3.0))
        assert (decision.worker_id is not None) is taken, tenant


def test_the_last_seats_are_not_for_a_tenant_above_its_share():
    state = cluster("a", max_running=16)
    fill(state, "a", 12, tenant="loud")
    fill(state, "a", 1, tenant="quiet")
    loud = asked(BATCH, tenant="loud", demand=1.9, largest_demand=1.9)
    assert admit(state, loud).worker_id == "a", "14 of 16 seats are taken with it"
    fill(state, "a", 1, tenant="quiet")
    assert admit(state, loud).worker_id is None
    assert admit(state, asked(BATCH, tenant="quiet", demand=0.1, largest_demand=1.9)).worker_id == "a"


def test_a_tenant_is_too_loud_for_others_from_the_same_demand_on_as_for_itself():
    state = cluster("a", "b")
    fill(state, "a", 8, tenant="loud")
    fill(state, "a", 1, tenant="quiet")
    fill(state, "b", 3, tenant="loud")
    fill(state, "b", 3, tenant="quiet")
    most, alike = (state.load(state.row(name)).tenants for name in "ab")
    for demand, loud in ((objectives.ABOVE_MEAN, False), (objectives.ABOVE_MEAN + 0.01, True)):
        own = objectives.share_of([most], asked(tenant="loud", demand=demand))
        beside = objectives.share_of([alike], asked(tenant="quiet", demand=0.5, largest_demand=demand))
        assert (own, beside) == (("above", "below") if loud else ("fair", "fair"))


def test_a_tenant_that_is_alone_has_everything():
    state = cluster("a", max_running=8)
    fill(state, "a", 8, 4, tenant="only")
    assert admit(state, asked(tenant="only")).worker_id == "a"


def test_a_tenants_share_follows_its_weight():
    state = cluster("a", max_running=8)
    fill(state, "a", 8, 2, tenant="large", weight=4.0)
    fill(state, "a", 0, 3, tenant="small")
    assert admit(state, asked(tenant="large", tenant_weight=4.0)).worker_id == "a"
    assert admit(state, asked(tenant="small")).worker_id is None


def test_shares_are_forgotten_with_the_requests():
    state = cluster("a")
    fill(state, "a", 3, tenant="t")
    for name in list(state.requests("a")):
        state.drop_request("a", name)
    load = state.load(state.row("a"))
    assert load.tenants == {} and all((b.running, b.queued, b.queue_tokens) == (0, 0, 0) for b in load.bands)


def drawn(number: int, rows: float = 8.0) -> RequestBrief:
    return RequestBrief(f"p{number}", 0, "", 0, 77, 0, 31, "running", 0.0, 0.0, picture=PictureBrief(rows))


def picture(**more):
    return asked(BATCH, **{"needs": {"draws": "model"}, "tpot_slo_ms": BATCH, "out_tokens": 31, "rows": 8.0} | more)


def test_an_objective_for_the_whole_answer_refuses_what_would_be_done_too_late():
    state = cluster("a", max_running=8, capabilities=("draws",))
    for number in range(4):
        state.put_request("a", drawn(number))
    assert admit(state, picture()).worker_id == admit(state, picture(e2e_slo_ms=2000.0)).worker_id == "a"
    # steps of 10 + 5 * 8 * 0.2 ms: 31 of them take 560 ms, and 380 ms without the others
    late = admit(state, picture(e2e_slo_ms=500.0))
    assert late.worker_id is None and late.late_s > 0
    assert admit(state, picture(e2e_slo_ms=500.0), admission="room").breaks_slo
    assert admit(state, picture(e2e_slo_ms=300.0)).worker_id == "a", "no worker can keep it, so it is no reason"


def test_the_decoding_of_a_picture_counts_in_the_time_of_the_whole_answer():
    request = picture(e2e_slo_ms=1600.0, area=4.0)
    answers = []
    for finish_ms in (0.0, 100.0, 200.0):
        state = ClusterState()
        state.put_worker(
            "a", worker_limits(max_running=8, capabilities=("draws",)), msgspec.structs.replace(PERF, finish_ms=finish_ms)
        )
        state.heard("a", 0.0, kv_blocks_free=400, draining=False)
        for number in range(4):
            state.put_request("a", drawn(number))
        answers.append(admit(state, request))
    # 30 steps of 18 ms and the picture; others are decoded meanwhile: each of 5 rows by another 4 * finish_ms in 100 steps
    quick, slow, slower = answers
    assert quick.worker_id == "a" and slow.worker_id is slower.worker_id is None
    assert slower.late_s - slow.late_s == pytest.approx((30 * 5 * 4 * 100.0 / L + 4 * 100.0) / 1000.0)


def test_rows_count_where_a_time_per_step_is_an_objective():
    state = cluster("a", max_running=8, capabilities=("draws",))
    for number in range(4):
        state.put_request("a", drawn(number))
    fine, tight = picture(tpot_slo_ms=25.0), picture(tpot_slo_ms=14.0)  # alone it takes 11.6 ms, with the others 18
    assert admit(state, fine).worker_id == "a" and admit(state, tight).worker_id is None
    small = cluster("a", max_running=8, capabilities=("draws",))
    for number in range(4):
        small.put_request("a", drawn(number, rows=0.5))
    assert admit(small, picture(tpot_slo_ms=14.0)).worker_id == "a"
