"""Effects of the client and the front end on a run: arrivals from the seed, lengths, merged chunks, ports."""

from __future__ import annotations

import numpy as np
import pytest

from motet.twin.vllm.client import ApiServer, Client, Requests
from motet.twin.vllm.workload import arrivals, lengths


def asked(count: int, gap_s: float = 1.0, output: int = 101) -> Requests:
    return Requests(
        arrival_s=[gap_s * i for i in range(count)],
        adapter=[0] * count,
        prompt_tokens=[10] * count,
        output_tokens=[output] * count,
        ranks=[8],
        duration_s=1_000.0,
    )


def test_arrivals_repeat_to_the_bit_and_differ_by_seed() -> None:
    assert arrivals([0.5, 2.0], 100.0, seed=0) == arrivals([0.5, 2.0], 100.0, seed=0)
    assert arrivals([0.5, 2.0], 100.0, seed=0) != arrivals([0.5, 2.0], 100.0, seed=1)


def test_adapters_draw_their_gaps_from_one_stream_in_the_order_they_wake() -> None:
    gaps = np.random.RandomState(7).standard_exponential(10)
    times, adapters = arrivals([1.0, 1.0], 3.0, seed=7)
    first = int(np.argmin(gaps[:2]))
    assert (times[0], adapters[0]) == (gaps[first], first)
    again = times[0] + gaps[2]  # the adapter that woke draws the third gap
    assert again in times or again > 3.0


def test_each_adapter_keeps_its_rate() -> None:
    _, adapters = arrivals([0.5, 2.0, 8.0], 4_000.0, seed=3)
    counts = np.bincount(adapters)
    assert counts == pytest.approx([2_000, 8_000, 32_000], rel=0.06)


@pytest.mark.parametrize("mean", [20, 200, 450])
def test_lengths_meet_their_mean_and_bounds(mean: int) -> None:
    drawn = np.array(lengths(5_000, mean, 1024, np.random.default_rng(0)))
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert (drawn.min(), drawn.max()) >= (4, mean)
    assert drawn.max() <= 1024


def test_a_mean_outside_of_the_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="mean length 900"):
        lengths(10, 900, 1024, np.random.default_rng(0))


def one_stream(api: ApiServer, decoding: int) -> Client:
    """One request of 101 tokens in steps of 100 ms while the front end is scraped once, after 1 s."""
    client = Client(asked(1), api)
    client.next_scrape_s = 1.0
    assert client.arrivals(0.0) == [0]
    client.labelled()
    client.first_token(0, 0.0)
    for step in range(100):
        client.stepped(step * 0.1, 0.1, 1, decoding, decoding)
    client.finished(0, 10.0)
    return client


def test_chunks_merge_while_the_front_end_is_blocked() -> None:
    quiet = one_stream(ApiServer(series_s=0.0, name_s=0.0), 1).outcome(1_000.0, preemptions=0, loads=0)
    blocked = one_stream(ApiServer(series_s=0.55, name_s=0.0, scrape_every_s=1e6), 1)
    assert quiet.itl_mean_ms == pytest.approx(100.0)
    assert blocked.merged == 4  # the ends of five steps fall into 0.55 s and leave as one chunk
    assert blocked.outcome(1_000.0, preemptions=0, loads=0).itl_mean_ms == pytest.approx(10_000 / 96)


def test_large_batches_leave_chunk_by_chunk() -> None:
    assert one_stream(ApiServer(series_s=0.55, name_s=0.0, scrape_every_s=1e6), 129).merged == 0


def test_requests_that_come_while_the_front_end_is_blocked_are_seen_afterwards() -> None:
    client = Client(asked(3, gap_s=1.2), ApiServer(series_s=0.5, name_s=0.0))
    client.labelled()
    client.next_scrape_s = 1.0
    assert client.arrivals(0.0) == [0]
    client.stepped(0.0, 1.3, 1, 1, 1)  # the scrape at 1.0 lasts until 1.5
    assert client.next_arrival_s() == pytest.approx(1.5)
    assert client.arrivals(1.3) == []
    client.stepped(1.3, 0.3, 1, 1, 1)
    assert client.arrivals(1.6) == [1]


def test_a_first_token_waits_until_the_front_end_is_free() -> None:
    client = Client(asked(1), ApiServer(series_s=0.5, name_s=0.0, request_s=0.007))
    client.labelled()
    client.next_scrape_s = 1.0
    assert client.arrivals(0.0) == [0]
    client.stepped(0.0, 1.2, 1, 0, 1)  # the scrape at 1.0 lasts until 1.5
    client.first_token(0, 1.2)
    client.finished(0, 2.0)
    outcome = client.outcome(10.0, preemptions=0, loads=0)
    assert outcome.ttft_mean_ms == pytest.approx(1_507)


def test_an_adapters_first_request_blocks_the_front_end() -> None:
    work = asked(5, gap_s=0.1)
    work.adapter[1] = 1
    work.ranks.append(8)
    client = Client(work, ApiServer(series_s=0.0, name_s=0.0, tokenizer_s=0.15))
    assert client.arrivals(0.29) == []  # two tokenizers, from 0 until 0.3
    assert client.next_arrival_s() == pytest.approx(0.3)
    assert client.arrivals(0.31) == [0, 1, 2, 3]
    assert client.next_arrival_s() == pytest.approx(0.4)
    client.first_token(0, 0.2)
    client.finished(0, 0.5)
    assert client.outcome(10.0, preemptions=0, loads=0).ttft_mean_ms == pytest.approx(300)


def test_times_to_first_token_are_those_of_completed_requests_unless_penalised() -> None:
    client = Client(asked(4), ApiServer())
    assert client.arrivals(9.0) == [0, 1, 2, 3]
    for request, ttft_s in enumerate((0.1, 0.2, 0.6, 0.4)):
        client.first_token(request, client.work.arrival_s[request] + ttft_s)
    for request in (0, 1, 2):
        client.finished(request, 8.0)
    client.finished(3, 10.5)  # after the window
    outcome = client.outcome(10.0, preemptions=0, loads=0)
    assert outcome.ttft_mean_ms == pytest.approx(300)
    assert outcome.ttft_median_ms == pytest.approx(200)
    assert outcome.ttft_p99_ms == pytest.approx(592)
    assert outcome.ttft_penalised_ms == pytest.approx((900 + 10_000) / 4)


def test_requests_fail_while_no_port_is_free() -> None:
    client = Client(asked(5, gap_s=10.0), ApiServer(ports=2))
    assert client.arrivals(25.0) == [0, 1]
    assert client.refused == 1  # both ports are open
    client.finished(0, 26.0)
    assert client.arrivals(35.0) == []  # one port is in TIME_WAIT, the other open
    client.finished(1, 36.0)
    client.work.arrival_s[4] = 100.0
    assert client.arrivals(101.0) == [4]
    assert client.refused == 2
