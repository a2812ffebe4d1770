"""The benches' rig: clients time what arrives, loads have their rate, and processes end with their context."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from bench.rig.answers import metric
from bench.rig.arrivals import poisson, poisson_within
from bench.rig.closed_loop import Counters, load
from bench.rig.laps import Lap, Laps, lap_over_http
from bench.rig.processes import ChildProcess, cpu_s, process_tree, spawned
from bench.rig.requests import PATIENT, Asking, Request, play, served_per_s
from bench.rig.waiting import until
from tests.support import until as eventually_so

OK = b"HTTP/1.1 200 OK\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n'
PAUSE_S = 0.3


@contextmanager
def server(*answers: Sequence[bytes]) -> Iterator[int]:
    """A server that gives the next connection the next answer, in parts with pauses between them; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(parts: Sequence[bytes], connection: socket.socket) -> None:
            with connection:
                connection.recv(1 << 16)
                for number, part in enumerate(parts):
                    time.sleep(PAUSE_S if number else 0.0)  # time: the gap that the client measures
                    connection.sendall(part)

        def accept() -> None:
            threads = [threading.Thread(target=serve, args=(parts, listener.accept()[0])) for parts in answers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        accepting = threading.Thread(target=accept)
        accepting.start()
        yield listener.getsockname()[1]
        accepting.join()


def asking() -> Asking:
    return Asking(vocabulary=100, prompt_tokens=4, output_tokens=2, models=("m",))


def test_arrivals_have_the_rate_they_are_asked_for() -> None:
    times_s = poisson_within(100.0, 50.0, seed=1)
    assert times_s == sorted(times_s) and len(times_s) == pytest.approx(5000, rel=0.1) and times_s[-1] < 100.0
    assert list(islice(poisson(50.0, random.Random(1)), 10)) == times_s[:10]


def test_refusals_and_tokens_are_read_off_the_wire() -> None:
    refusal = b'HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\n\r\n{"error":{}}'
    first, second = asking().request(0.0, PATIENT, "a"), asking().request(0.05, PATIENT, "a")
    with server([OK + TOKEN + TOKEN], [refusal]) as port:
        play(port, [second, first])
    assert (first.status, first.tokens, second.status, second.retry_after_s) == (200, 2, 429, 3.0)
    assert first.first_s > 0 and second.answered_s >= second.sent_s >= 0.05


def test_the_gap_before_tokens_that_come_together_is_shared_by_them() -> None:
    one = asking().request(0.0, PATIENT, "a")
    with server([OK + TOKEN, TOKEN + TOKEN]) as port:
        play(port, [one])
    assert one.tokens == 3 and one.last_s <= one.ended_s
    assert one.gaps_s == pytest.approx([(one.last_s - one.first_s) / 2] * 2) and one.last_s - one.first_s > PAUSE_S / 2


def test_an_answer_is_whole_when_it_reached_its_length() -> None:
    last = b'data: {"choices": [{"text": "b", "finish_reason": "length"}]}\n\n'
    whole, broken = (Request(wire=asking().request(0.0, PATIENT, "a").wire, keep=True) for _ in range(2))
    with server([OK + TOKEN + last]) as port:
        play(port, [whole])
    with server([OK + TOKEN]) as port:
        play(port, [broken])
    assert whole.whole and whole.text == "ab" and not broken.whole
    assert whole.again() == Request(wire=whole.wire, keep=True)


def test_an_event_that_comes_in_two_pieces_counts_once_and_an_ended_stream_is_asked_for_again() -> None:
    first, second = b'data: {"choices":[]}\n\nda', b"ta: [DONE]\n\n\r\n0\r\n\r\n"
    counters, asked = Counters(multiprocessing, 1), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as connection:
                for _ in range(2):
                    asked.append(connection.recv(1 << 16))
                    connection.sendall(OK + first)
                    time.sleep(PAUSE_S)  # time: the client reads the first piece alone
                    connection.sendall(second)
                connection.recv(1 << 16)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(RuntimeError, match="closed a connection"):
            load(listener.getsockname()[1], 1, {"model": "m"}, counters)
        serving.join()
    assert counters.seen.value == 4 and 2 <= counters.reads.value <= 4
    assert asked[0] == asked[1] and asked[0].endswith(b'{"model": "m"}')


def test_a_capacity_is_not_measured_with_refused_requests() -> None:
    with server([b"HTTP/1.1 429 Too Many Requests\r\n\r\n"]) as port, pytest.raises(RuntimeError, match="429"):
        served_per_s(port, [asking().request(0.0, PATIENT, "a")])


def test_a_lap_takes_only_answers_of_the_full_length() -> None:
    full, short = [OK + TOKEN, TOKEN + USAGE % 2], [OK + TOKEN + USAGE % 1]
    with server(full, full) as port:
        lap = lap_over_http(port, [[1, 2], [3]], 2)
    assert len(lap.first_s) == 2 and lap.gaps_s == pytest.approx(lap.tpot_s) and min(lap.tpot_s) > PAUSE_S / 2
    with server(short) as port, pytest.raises(RuntimeError, match="not 2 tokens"):
        lap_over_http(port, [[1, 2]], 2)


def test_latencies_are_over_all_streams_of_all_laps_and_rates_by_lap() -> None:
    laps = Laps([Lap([0.1, 0.3], [1.1, 2.3], 11, [0.1]), Lap([0.2], [4.2], 11, [0.3]), Lap([0.2], [11.0], 11)])
    assert (laps.ttft_ms(0.0), laps.ttft_ms(0.5), laps.ttft_ms(1.0)) == pytest.approx((100, 200, 300))
    assert laps.tpot_ms(0.0) == pytest.approx(100) and laps.itl_ms(0.5) == pytest.approx(200)
    assert laps.tokens_per_s == pytest.approx(11 / 4.2)


def test_a_metric_is_summed_over_its_labels_and_zero_without_any() -> None:
    text = b'# TYPE moved_total counter\nmoved_total{why="a"} 2.0\nmoved_total{why="b"} 3.0\n'
    with server([OK + text]) as port:
        assert metric(f"http://127.0.0.1:{port}", "moved_total") == 5.0
    with server([OK + text]) as port:
        assert metric(f"http://127.0.0.1:{port}", "lost_total") == 0.0


def test_waiting_ends_with_what_was_found_or_says_what_is_missing() -> None:
    assert until(iter([0, 0, 7]).__next__, str, within_s=5.0, every_s=0.0) == 7
    with pytest.raises(RuntimeError, match="no server"):
        until(lambda: False, lambda: "no server", within_s=0.0, every_s=0.0)


def test_a_process_ends_with_its_descendants_and_its_output_is_in_its_log(tmp_path: Path) -> None:
    script = "import subprocess, sys, time\nprint('up', flush=True)\nsubprocess.Popen(['sleep', '600']); time.sleep(600)"
    with ChildProcess("parent", [sys.executable, "-c", script], os.environ, log=tmp_path / "log", end_s=0.5) as process:
        family = eventually_so(lambda: [process.tree()] if len(process.tree()) > 1 else [])[0]
        assert process.said() == "up" and not process.ended
        assert process.cpu_s() >= 0 and process.rss_mib()[0] <= process.rss_mib()[1]
    assert len(family) == 2
    eventually_so(lambda: not any(_runs(pid) for pid in family))


def test_a_piped_process_answers_until_its_input_ends() -> None:
    echo = [sys.executable, "-c", "import sys\nfor line in sys.stdin: print(line, end='', flush=True)\nprint('over')"]
    with ChildProcess("echo", echo, os.environ, piped=True) as process:
        process.asking.write(b"hello\n")
        process.asking.flush()
        assert process.answering.readline() == b"hello\n"
    assert process.ended


def test_a_spawned_process_says_when_it_is_ready_and_is_ended() -> None:
    with spawned(_ready, 5) as child:
        assert child.first == 5 and child.pid in process_tree(os.getpid()) and cpu_s(child.pid) >= 0
    assert not _runs(child.pid)
    with pytest.raises(RuntimeError, match="_fails did not start"), spawned(_fails):
        pass


def _ready(pipe: Connection, number: int) -> None:
    pipe.send(number)
    pipe.recv()


def _fails(pipe: Connection) -> None:
    sys.exit(3)


def _runs(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
