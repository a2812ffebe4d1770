"""The overload bench's client counts tokens and outcomes correctly."""

from __future__ import annotations

import socket
import threading

import pytest

from bench import overload
from bench.overload_parts import Asking, Kind, Request, play, poisson

KIND = Kind(name="interactive", ttft_slo_ms=500.0, tpot_slo_ms=50.0)


def seen(**changed) -> Request:
    fields = {"at_s": 5.0, "kind": KIND, "tenant": "a", "wire": b"", "status": 200, "first_s": 5.3, "last_s": 5.7, "tokens": 11}
    return Request(**(fields | changed))


@pytest.mark.parametrize(
    ("changed", "kept"),
    [({}, True), ({"first_s": 5.6}, False), ({"last_s": 6.0}, False), ({"status": 429, "tokens": 0}, False)],
)
def test_a_request_is_kept_when_both_objectives_are(changed: dict, kept: bool) -> None:
    assert seen(**changed).kept == kept


def test_arrivals_have_the_rate_they_are_asked_for() -> None:
    times = poisson(50.0, 100.0, seed=1)
    assert times == sorted(times) and len(times) == pytest.approx(5000, rel=0.1) and times[-1] < 100.0


def test_refusals_and_tokens_are_read_off_the_wire() -> None:
    answers = [
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"text":"a"}\n\ndata: {"text":"b"}\n\n',
        b'HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\n\r\n{"error":{}}',
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        asking = Asking(vocabulary=100, prompt_tokens=4, output_tokens=2, models=("m",))
        first, second = asking.request(0.0, KIND, "a"), asking.request(0.05, KIND, "a")
        play(server.getsockname()[1], [first, second])
        thread.join()
    assert (first.status, first.tokens, second.status, second.retry_after_s) == (200, 2, 429, 3.0)
    assert first.first_s > 0 and second.answered_s >= second.at_s


def test_goodput_counts_the_measured_part_only() -> None:
    requests = [seen(), seen(at_s=0.5, first_s=0.6, last_s=0.9), seen(status=429, tokens=0, retry_after_s=2.0, answered_s=5.01)]
    row = overload.measures(requests, 4.0, 14.0)
    assert row["goodput_per_s"] == 0.1 and row["refused"] == 0.5 and row["interactive_attainment"] == 0.5
    assert row["refusal_p99_ms"] == pytest.approx(10.0) and row["retry_after_mean_s"] == 2.0
