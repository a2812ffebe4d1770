"""The requests of a run from its description: the client's own arrival process, and lengths of which only means are known."""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

LENGTH_MIN_TOKENS = 4
PROMPT_MAX_TOKENS = 1024  # limits of the client when it chose its prompts
REQUEST_MAX_TOKENS = 2048  # prompt and completion


def arrivals(rates_req_s: list[float], duration_s: float, seed: int) -> tuple[list[float], list[int]]:
    """Poisson arrivals of each adapter, merged: (seconds, adapter) in order of time.

    They are drawn as the client does it: one coroutine per adapter. All draw exponential gaps from one stream of numpy's legacy
    generator, in the order in which they wake up; the first request comes after one gap.
    """
    mean = sum(rates_req_s) * duration_s
    stream = np.random.RandomState(seed)
    gaps: list[float] = stream.standard_exponential(int(mean + 6 * math.sqrt(mean)) + 2 * len(rates_req_s) + 16).tolist()
    heap = [(gap / rate, adapter) for adapter, (gap, rate) in enumerate(zip(gaps, rates_req_s, strict=False))]
    heapq.heapify(heap)
    used = len(heap)
    times: list[float] = []
    adapters: list[int] = []
    while heap and heap[0][0] <= duration_s:
        time_s, adapter = heap[0]
        times.append(time_s)
        adapters.append(adapter)
        if used == len(gaps):
            gaps += stream.standard_exponential(1024).tolist()
        heapq.heapreplace(heap, (time_s + gaps[used] / rates_req_s[adapter], adapter))
        used += 1
    return times, adapters


def lengths(count: int, mean_tokens: float, max_tokens: int, rng: np.random.Generator) -> list[int]:
    """`count` lengths with a given mean, between 4 and `max_tokens` tokens.

    A run's description contains only the mean of its lengths. So the distribution is the one of maximum entropy for that mean
    and these bounds: an exponential, cut at both ends. First turns of chats are close to it: many short ones.
    """
    low, high = float(LENGTH_MIN_TOKENS), float(max_tokens)
    if not low < mean_tokens < (low + high) / 2:
        raise ValueError(f"mean length {mean_tokens:g} is not between {low:g} and {(low + high) / 2:g} tokens")
    decay = _decay(mean_tokens, low, high)
    uniform: NDArray[np.float64] = (rng.permutation(count) + rng.random(count)) / max(1, count)  # stratified: the mean is met
    values = low - np.log1p(uniform * np.expm1(-decay * (high - low))) / decay
    tokens: list[int] = np.rint(values).astype(np.int64).tolist()
    return tokens


def _decay(mean: float, low: float, high: float) -> float:
    """The rate of the exponential on [low, high] that has this mean, by bisection."""
    small, large = 1e-6, 1.0
    for _ in range(100):
        rate = math.sqrt(small * large)
        if low + 1 / rate - (high - low) / math.expm1(rate * (high - low)) > mean:
            small = rate
        else:
            large = rate
    return rate
