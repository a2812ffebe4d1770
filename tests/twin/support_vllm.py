"""Requests and step times for tests of the twin's vLLM flavour."""

from __future__ import annotations

import numpy as np

from motet.twin.vllm.client import Requests
from motet.twin.vllm.steps import TERMS, VllmStepModel
from motet.twin.vllm.workload import arrivals, lengths


def model(**ms: float) -> VllmStepModel:
    """A step model with the given milliseconds per unit; the others cost nothing."""
    weights = {term: ms.get(term, 0.0) for term in TERMS}
    return VllmStepModel(ms=weights, load_full_ms=5.0, load_padded_ms=8.0, scan_us=0.0, listed_us=0.0)


TEN_MS = model(constant=10.0)


def work(*requests: tuple[float, int, int, int], ranks: tuple[int, ...] = (8, 8, 8), duration_s: float = 100.0) -> Requests:
    """Requests as (arrival in seconds, adapter, prompt tokens, output tokens)."""
    arrival, adapter, prompt, output = (list(column) for column in zip(*requests, strict=True))
    return Requests(
        arrival_s=[float(t) for t in arrival],
        adapter=[int(a) for a in adapter],
        prompt_tokens=[int(t) for t in prompt],
        output_tokens=[int(t) for t in output],
        ranks=list(ranks),
        duration_s=duration_s,
    )


def drawn(rate: float, adapters: int, duration_s: float) -> Requests:
    """Poisson arrivals of so many adapters of rank 8, each with this rate; 200 and 150 tokens on average."""
    rng = np.random.default_rng(3)
    times, which = arrivals([rate] * adapters, duration_s, seed=1)
    return Requests(
        arrival_s=times,
        adapter=which,
        prompt_tokens=lengths(len(times), 200, 1024, rng),
        output_tokens=lengths(len(times), 150, 1024, rng),
        ranks=[8] * adapters,
        duration_s=duration_s,
    )
