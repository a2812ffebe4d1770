"""The client of the measured runs and vLLM's HTTP front end, as far as they affect what the client measures.

The front end is one process with one event loop. A scrape of its metrics blocks it while the answer is written, and answers
grow: `lora_requests_info` adds a time series for every new set of running and waiting adapters, so after an hour with many
adapters a scrape takes most of a second. The engine continues meanwhile. Afterwards the tokens of several steps reach a
stream at once and are sent as one chunk, unless the batch is larger than one slice of the output loop (128 requests), because
streams run between slices. The client counts a gap per chunk, so mean inter-token latency rises by tokens / chunks although
no token was later on average.

The same loop starts requests and sends their first tokens, so both wait while it is blocked. The first request of an adapter
blocks it too: vLLM looks for a tokenizer in the adapter's folder. After the start of a server with many adapters this takes
most of a minute, and what comes meanwhile is started together at its end.

The client uses a TCP connection per request. Ports of finished requests stay in TIME_WAIT for a minute; when all are taken, new
requests fail at once.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

PORTS = 28_232  # of a client's machine; Linux has 32768 to 60999
TIME_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests to one server, in order of arrival, and the rank of each adapter."""

    arrival_s: list[float]
    adapter: list[int]
    prompt_tokens: list[int]
    output_tokens: list[int]
    ranks: list[int]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """What the front end adds to requests, how long a scrape of the metrics blocks it, and how often the client scrapes.

    By default a scrape takes 1.5 times as long as prometheus_client needs on one core here to write and compress the answer: 6,
    11, 16 and 21 us per series at 4, 16, 50 and 150 names. The factor is from the time series of five published ml-test runs,
    whose samples are 1.5 to 1.8 times that time further apart than the client's pause.
    """

    request_s: float = 0.0  # of each request, outside of the engine: HTTP, tokens of the prompt, the first chunk
    tokenizer_s: float = 0.0  # blocked by an adapter's first request
    scrape_every_s: float = 2.0  # pause between the end of a scrape and the next
    series_s: float = 12e-6  # per time series of the answer: formatting and compression
    name_s: float = 0.135e-6  # per adapter name in their labels
    slice_requests: int = 128  # requests whose outputs are handled before the streams get their turn
    ports: int = PORTS

    def serving(self, ports: int = sys.maxsize) -> ApiServer:
        """The front end without what belongs to measuring: nobody scrapes it, its tokenizers are loaded, ports do not end."""
        return replace(self, tokenizer_s=0.0, series_s=0.0, name_s=0.0, ports=ports)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the client measured, over requests that completed inside the window. Latencies in ms, rates per second.

    `ttft_penalised_ms` is what the paper calls TTFT: the mean over all requests sent, where one that did not complete counts as
    the whole window.
    """

    completed: int
    refused: int  # no port was free
    input_tok_s: float
    output_tok_s: float
    itl_mean_ms: float
    ttft_mean_ms: float
    ttft_median_ms: float
    ttft_p99_ms: float
    ttft_penalised_ms: float
    running_mean: float
    steps: int
    loads: int
    preemptions: int

    @property
    def total_tok_s(self) -> float:
        """Input and output tokens per second, which is the paper's throughput."""
        return self.input_tok_s + self.output_tok_s


class Client:
    """Sends the workload, records the engine's steps, and turns both into an `Outcome`."""

    def __init__(self, work: Requests, api: ApiServer) -> None:
        self.work = work
        self.api = api
        self.loading = _tokenizer_loads(work, api.tokenizer_s)
        self.starts_s = [self._loaded(arrival_s) for arrival_s in work.arrival_s]  # by request: the front end starts it
        self.sent = 0  # arrivals up to here were sent or refused
        self.open = 0
        self.refused = 0
        self.closed_s: deque[float] = deque()  # ends of requests whose ports are in TIME_WAIT
        n = len(work.arrival_s)
        self.first_s = [math.nan] * n
        self.ttft_s = [math.nan] * n
        self.last_s = [math.nan] * n
        self.merged_before = [0] * n  # `merged` at the first token
        self.merged_within = [0] * n
        self.merged = 0  # chunks that a stream which is always open has lost so far
        self.steps = 0
        self.strides = 0  # times that equal steps were made in one go
        self.running_s = 0.0
        # label sets of the metrics: a random word per (adapter, running or waiting), combined by exclusive or
        words = np.random.default_rng(0).integers(1, 2**62, (2, max(1, len(work.ranks))))
        self.running_word, self.waiting_word = words.tolist()
        self.labels = 0
        self.names = 0
        self.seen: set[int] = set()
        self.series_names = 0
        self.next_scrape_s = 0.0
        self.blocked_until_s: float | None = None
        self.steps_at_block = 0

    # ---- arrivals

    def next_arrival_s(self) -> float:
        """When the engine can see the next request: at its arrival, or when the front end is free again."""
        if self.sent >= len(self.starts_s):
            return math.inf
        start_s = self.starts_s[self.sent]
        if self.blocked_until_s is not None and start_s > self.next_scrape_s:
            return max(start_s, self.blocked_until_s)
        return start_s

    def arrivals(self, now_s: float) -> list[int]:
        """The requests that have reached the engine since the last call."""
        until_s = now_s if self.blocked_until_s is None else self.next_scrape_s
        taken = []
        while self.sent < len(self.starts_s) and self.starts_s[self.sent] <= until_s:
            if self.open + self._in_time_wait(self.work.arrival_s[self.sent]) < self.api.ports:
                self.open += 1
                taken.append(self.sent)
            else:
                self.refused += 1
            self.sent += 1
        return taken

    def _loaded(self, now_s: float) -> float:
        """`now_s`, or the end of the tokenizer loads that block the front end then."""
        index = bisect_right(self.loading, (now_s, math.inf)) - 1
        return now_s if index < 0 else max(now_s, self.loading[index][1])

    def _in_time_wait(self, now_s: float) -> int:
        while self.closed_s and self.closed_s[0] < now_s - TIME_WAIT_S:
            self.closed_s.popleft()
        return len(self.closed_s)

    # ---- what the engine reports

    def entered(self, adapter: int) -> None:
        """An adapter's first request is in the batch."""
        self.labels ^= self.running_word[adapter]
        self.names += 1

    def left(self, adapter: int) -> None:
        """An adapter's last request has left the batch."""
        self.labels ^= self.running_word[adapter]
        self.names -= 1

    def queued(self, adapter: int) -> None:
        """An adapter's first request waits."""
        self.labels ^= self.waiting_word[adapter]
        self.names += 1

    def unqueued(self, adapter: int) -> None:
        """No request of an adapter waits any more."""
        self.labels ^= self.waiting_word[adapter]
        self.names -= 1

    def first_token(self, request: int, now_s: float) -> None:
        """A prompt is finished: the end of its last step. The token leaves when the front end is free."""
        self.first_s[request] = now_s
        leaves_s = self._loaded(now_s if self.blocked_until_s is None else self.blocked_until_s)
        self.ttft_s[request] = leaves_s + self.api.request_s - self.work.arrival_s[request]
        self.merged_before[request] = self.merged

    def finished(self, request: int, now_s: float) -> None:
        """A request is finished: the end of its last step."""
        self.last_s[request] = now_s
        self.merged_within[request] = self.merged - self.merged_before[request]
        self.open -= 1
        self.closed_s.append(now_s)

    def stepped(self, from_s: float, took_s: float, steps: int, decoding: int, running: int) -> None:
        """`steps` equal steps with the same batch, from `from_s` on."""
        self.strides += 1
        self.running_s += took_s * running
        self._scrape(from_s, from_s + took_s, took_s / steps, decoding)
        self.steps += steps

    def labelled(self) -> None:
        """The front end has handled a step's outputs, so its metrics now name the running and waiting adapters."""
        if self.labels not in self.seen:
            self.seen.add(self.labels)
            self.series_names += self.names

    def idle_until(self, until_s: float) -> None:
        """Nothing runs until `until_s`."""
        self._scrape(until_s, until_s, 1.0, 0)

    def _scrape(self, from_s: float, to_s: float, step_s: float, decoding: int) -> None:
        while True:
            if self.blocked_until_s is None:
                if self.next_scrape_s >= to_s:
                    return
                blocked_s = len(self.seen) * self.api.series_s + self.series_names * self.api.name_s
                self.blocked_until_s = self.next_scrape_s + blocked_s
                self.steps_at_block = self.steps + max(0, int((self.next_scrape_s - from_s) / step_s))
            if self.blocked_until_s > to_s:
                return
            steps_inside = self.steps + max(0, int((self.blocked_until_s - from_s) / step_s)) - self.steps_at_block
            if steps_inside > 1 and decoding <= self.api.slice_requests:
                self.merged += steps_inside - 1
            self.next_scrape_s = self.blocked_until_s + self.api.scrape_every_s
            self.blocked_until_s = None

    # ---- what it all was

    def outcome(self, end_s: float, *, preemptions: int, loads: int) -> Outcome:
        """The outcome over requests whose last token came before `end_s`. Tokens are those of prompts and completions."""
        last_s = np.asarray(self.last_s)
        done = np.flatnonzero(last_s <= end_s)
        prompt = np.asarray(self.work.prompt_tokens)[done]
        output = np.asarray(self.work.output_tokens)[done]
        decode_s = (last_s - np.asarray(self.first_s))[done]
        gaps = output - 1
        many = gaps > 0
        chunk_gaps = (gaps - np.minimum(np.asarray(self.merged_within)[done], gaps - 1))[many]
        ttft_ms = np.asarray(self.ttft_s)[done] * 1e3
        sent = self.sent - self.refused
        return Outcome(
            completed=len(done),
            refused=self.refused,
            input_tok_s=float(prompt.sum()) / end_s,
            output_tok_s=float(output.sum()) / end_s,
            itl_mean_ms=float(decode_s[many].sum() / chunk_gaps.sum()) * 1e3 if len(done) else math.nan,
            ttft_mean_ms=float(ttft_ms.mean()) if len(done) else math.nan,
            ttft_median_ms=float(np.median(ttft_ms)) if len(done) else math.nan,
            ttft_p99_ms=float(np.percentile(ttft_ms, 99)) if len(done) else math.nan,
            ttft_penalised_ms=float(ttft_ms.sum() + (sent - len(done)) * end_s * 1e3) / sent if sent else math.nan,
            running_mean=self.running_s / end_s,
            steps=self.steps,
            loads=loads,
            preemptions=preemptions,
        )


def _tokenizer_loads(work: Requests, load_s: float) -> list[tuple[float, float]]:
    """When tokenizers are loaded: (start, end) in seconds. Loads that overlap share the interpreter, so all end together."""
    spans: list[tuple[float, float]] = []
    seen: set[int] = set()
    for now_s, adapter in zip(work.arrival_s, work.adapter, strict=True):
        if adapter in seen or load_s == 0.0:
            continue
        seen.add(adapter)
        if spans and now_s <= spans[-1][1]:
            spans[-1] = (spans[-1][0], spans[-1][1] + load_s)
        else:
            spans.append((now_s, now_s + load_s))
    return spans
