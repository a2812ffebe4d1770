"""The adapters of a plan with what is asked of each: as numbers for the law, and as requests for the twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from motet.policies.plan.demand import Demand
from motet.shared.model import Slo
from motet.twin.workload import Floats, Ints, Lengths, Workload, per_adapter

PEAK_WINDOW_S = 10.0
"""Arrivals are counted in windows of about the time that a request takes."""
OWN_LENGTHS = 50  # requests of an adapter in a trace from which on its lengths are its own


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective of a class, and the share of its requests that must meet it."""

    slo: Slo
    share: float = 0.99


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Adapters [n] and their load. `lengths` are pools of pairs of prompt and output tokens, `objectives` the classes."""

    names: tuple[str, ...]
    rate: Floats  # requests/s
    rank: Ints  # 0 for the base model
    size_bytes: Ints
    pool: Ints  # index into `lengths`
    objective: Ints  # index into `objectives`
    lengths: tuple[Lengths, ...]
    objectives: tuple[Objective, ...]
    cv: float = 1.0
    """Coefficient of variation of the gaps between an adapter's requests."""
    peakedness: float = 1.0
    """Variance over mean of the arrivals in `PEAK_WINDOW_S`."""
    span_s: float = 0.0
    windows: tuple[float, ...] = ()
    """The rates of equal windows of a recorded workload that lasted `span_s`, relative to the planned rate."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def demand(self) -> Demand:
        """What the law needs to know."""
        prompt, prompt_square, prompt_p99, output, output_square, output_inverse = np.array([_means(p) for p in self.lengths])[
            self.pool
        ].T
        objectives = np.array([(o.slo.ttft_slo_ms, o.slo.tpot_slo_ms, o.share) for o in self.objectives])
        ttft_slo_ms, tpot_slo_ms, share = objectives[self.objective].T
        return Demand.of(
            self.rate,
            rank=self.rank,
            size_bytes=self.size_bytes,
            prompt_tokens=prompt,
            prompt_square=prompt_square,
            prompt_p99=prompt_p99,
            output_tokens=output,
            output_square=output_square,
            output_inverse=output_inverse,
            ttft_slo_ms=ttft_slo_ms,
            tpot_slo_ms=tpot_slo_ms,
            share=share,
            peakedness=self.peakedness,
        )

    def take(self, rows: NDArray[np.intp], rate: Floats) -> Loads:
        """Some of the adapters, with these rates."""
        return replace(
            self,
            names=tuple(self.names[row] for row in rows.tolist()),
            rate=rate,
            rank=self.rank[rows],
            size_bytes=self.size_bytes[rows],
            pool=self.pool[rows],
            objective=self.objective[rows],
        )

    def slim(self) -> Loads:
        """The same without pools of lengths that no adapter draws from."""
        used, pool = np.unique(self.pool, return_inverse=True)
        return replace(self, pool=pool, lengths=tuple(self.lengths[index] for index in used.tolist()))

    def faster(self, factor: float) -> Loads:
        """The same adapters at `factor` times their rates."""
        return replace(self, rate=self.rate * factor)

    def workload(self, rng: Generator, duration_s: float, *, most_tokens: float = np.inf) -> Workload:
        """Requests of so many seconds, drawn anew. Pairs of lengths above `most_tokens` are left out."""
        arrival_s, adapter = per_adapter(rng, self.rate, duration_s, cv=self.cv)
        pool = self.pool[adapter]
        prompt, output = np.ones((2, len(adapter)), np.int64)
        for index in np.unique(pool).tolist():
            mine = np.flatnonzero(pool == index)
            prompt[mine], output[mine] = capped(self.lengths[index], most_tokens).draw(rng, len(mine))
        # the base model is adapter -1 in a workload; others keep their row here
        is_base = self.rank == 0
        return Workload(
            arrival_s=arrival_s,
            adapter=np.where(is_base[adapter], -1, adapter),
            prompt_tokens=prompt,
            output_tokens=output,
            ranks=np.maximum(self.rank, 1),
            adapter_bytes=np.maximum(self.size_bytes, 1),
            slo=self.objective[adapter],
            slos=tuple(objective.slo for objective in self.objectives),
        )


def _means(lengths: Lengths) -> tuple[float, ...]:
    """The columns of a demand that are about lengths, in their order."""
    prompt, output = lengths.prompt_tokens.astype(np.float64), lengths.output_tokens.astype(np.float64)
    gaps = output[output > 1] - 1
    return (
        float(prompt.mean()),
        float(np.square(prompt).mean()),
        float(np.percentile(prompt, 99)),
        float(output.mean()),
        float(np.square(output).mean()),
        float((1.0 / gaps).mean()) if len(gaps) else 1.0,
    )


def capped(lengths: Lengths, most_tokens: float) -> Lengths:
    """The pairs that are not longer together than `most_tokens`. Raises ValueError if none is."""
    fits = lengths.prompt_tokens + lengths.output_tokens <= most_tokens
    if not fits.any():
        raise ValueError(f"every request is longer than {most_tokens:g} tokens")
    return Lengths(lengths.prompt_tokens[fits], lengths.output_tokens[fits])


def from_workload(workload: Workload, objectives: Sequence[Objective], *, percentile: float, window_s: float = 300.0) -> Loads:
    """The loads that a recorded workload has in a busy window: the `percentile` of the rates of windows of `window_s`.

    Shares of adapters are those of the whole workload. Classes keep their objectives unless `objectives` name them anew. The
    base model, if asked for, comes last and is called "base".
    """
    span_s = max(workload.duration_s, 1e-9)
    edges = np.linspace(0.0, span_s, max(1, round(span_s / window_s)) + 1)
    counts, _ = np.histogram(workload.arrival_s, edges)
    busy = float(np.percentile(counts / np.diff(edges), percentile))
    named = {objective.slo.slo_class: objective for objective in objectives}
    classes = tuple(named.get(slo.slo_class, Objective(slo=slo)) for slo in workload.slos)
    which = np.where(workload.adapter < 0, len(workload.ranks), workload.adapter)
    asked = np.bincount(which, minlength=len(workload.ranks) + 1)
    rows = np.flatnonzero(asked)
    pools = [Lengths(workload.prompt_tokens, workload.output_tokens)]
    pool, objective = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    order = np.argsort(which, kind="stable")
    parts = np.split(order, np.cumsum(asked)[:-1])
    for place, row in enumerate(rows.tolist()):
        mine = parts[row]
        objective[place] = np.bincount(workload.objective[mine]).argmax()
        if len(mine) >= OWN_LENGTHS:
            pool[place] = len(pools)
            pools.append(Lengths(workload.prompt_tokens[mine], workload.output_tokens[mine]))
    return Loads(
        names=tuple("base" if row == len(workload.ranks) else workload.adapters[row].name for row in rows.tolist()),
        rate=asked[rows] / len(workload) * busy,
        rank=np.append(workload.ranks, 0)[rows],
        size_bytes=np.append(workload.adapter_bytes, 0)[rows],
        pool=pool,
        objective=objective,
        lengths=tuple(pools),
        objectives=classes,
        cv=float(np.sqrt(max(1.0, peakedness(workload.arrival_s, edges)))),
        peakedness=peakedness(workload.arrival_s, edges),
        span_s=span_s,
        windows=tuple((counts / np.diff(edges) / busy).tolist()),
    )


def peakedness(arrival_s: Floats, edges_s: Floats) -> float:
    """Variance over mean of the arrivals in short windows, at least 1.

    A change of the rate from one span between `edges_s` to the next does not count: a plan is made for a busy span.
    """
    ratios = []
    for begin_s, end_s in pairwise(edges_s.tolist()):
        windows = int((end_s - begin_s) / PEAK_WINDOW_S)
        counts, _ = np.histogram(arrival_s, np.linspace(begin_s, end_s, windows + 1)) if windows > 1 else (np.zeros(0), None)
        if windows > 1 and counts.sum():
            ratios.append((float(counts.var(ddof=1) / counts.mean()), float(counts.sum())))
    if not ratios:
        return 1.0
    values, weights = np.array(ratios).T
    return max(1.0, float(np.average(values, weights=weights)))
