"""Workloads: arrival times, adapters and token counts, in columns instead of objects so that millions fit in memory.

Arrivals come from one construction: a renewal process of unit rate (Gamma with a coefficient of variation; 1 is Poisson)
is stretched by the inverse of the cumulated rate. `Intensity` is that rate over time: constant, a day, a flash crowd, or
counts per minute of a recorded trace. Everything random draws from the generator it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, repeat

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from motet.shared.model import AdapterRef, ImageParams, Slo, Weighted
from motet.twin.events import PS_PER_S

AT_ONCE = 4096  # requests made of columns
BASE = AdapterRef(name="", digest="", rank=0, size_bytes=0)
"""The reference that requests without an adapter have."""
MAX_CV = 30.0  # beyond that nearly all requests come at the same few instants

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Request(msgspec.Struct, frozen=True):
    """One request as engines and schedulers of the twin see it."""

    index: int
    arrival_ps: int
    adapter: AdapterRef
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    prefix: tuple[int, ...] = ()
    """Ids of its first blocks of `prefix_tokens` tokens; equal ids are equal content. They may cover its output as well."""
    prefix_tokens: int = 0
    tenant: str = "default"
    tenant_weight: float = 1.0
    image: ImageParams | None = None
    """Of a request for a picture, whose output tokens are its steps and the picture."""
    more: tuple[AdapterRef, ...] = ()
    """Its adapters after the first."""

    @property
    def request_id(self) -> str:
        """The request's id in messages."""
        return str(self.index)

    @property
    def adapters(self) -> tuple[AdapterRef, ...]:
        """All its adapters; none for the base."""
        return (self.adapter, *self.more) if self.adapter.digest else ()

    @property
    def weighted(self) -> tuple[Weighted, ...]:
        """All its adapters. Times do not depend on the weights."""
        return tuple([Weighted(one) for one in self.adapters])


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`n` requests in order of arrival and the adapters they use."""

    arrival_s: Floats
    adapter: Ints  # [n] index, -1 for the base
    prompt_tokens: Ints  # [n] at least 1
    output_tokens: Ints  # [n] at least 1
    ranks: Ints  # [adapters]
    adapter_bytes: Ints  # [adapters]
    slo: Ints | None = None  # [n] index into `slos`; None for the first
    slos: tuple[Slo, ...] = (Slo(),)
    prefix: Sequence[tuple[int, ...]] | None = None
    prefix_tokens: int = 0
    tenant: Ints | None = None  # [n] index into `tenants`; None for the first
    tenants: tuple[tuple[str, float], ...] = (("default", 1.0),)  # name, and share relative to the others'
    image: Ints | None = None  # [n] index into `images`, of requests for pictures
    images: tuple[ImageParams, ...] = ()
    more: Sequence[tuple[int, ...]] | None = None  # [n] adapters after the first

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        for name in ("adapter", "prompt_tokens", "output_tokens", "slo", "prefix", "tenant", "image", "more"):
            column = getattr(self, name)
            if column is not None and len(column) != n:
                raise ValueError(f"{name} has {len(column)} entries for {n} requests")
        if n and not (np.isfinite(self.arrival_s).all() and self.arrival_s[0] >= 0 and (np.diff(self.arrival_s) >= 0).all()):
            raise ValueError("arrival_s must be finite, not negative and in ascending order")
        if n and min(self.prompt_tokens.min(), self.output_tokens.min()) < 1:
            raise ValueError("prompt_tokens and output_tokens must be at least 1")
        if n and not (self.adapter.min() >= -1 and self.adapter.max() < len(self.ranks)):
            raise ValueError(f"adapter must be between -1 and {len(self.ranks) - 1}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __iter__(self) -> Iterator[Request]:
        for begin in range(0, len(self), AT_ONCE):
            yield from self._between(begin, begin + AT_ONCE)

    @property
    def objective(self) -> Ints:
        """Of each request, the place of its objective in `slos`."""
        return self.slo if self.slo is not None else np.zeros(len(self), np.int64)

    @property
    def duration_s(self) -> float:
        """Seconds from 0 to the last arrival."""
        return float(self.arrival_s[-1]) if len(self) else 0.0

    @cached_property
    def adapters(self) -> list[AdapterRef]:
        """Every adapter, by its index. Its digest is its name."""
        names = [f"adapter-{index:05d}" for index in range(len(self.ranks))]
        columns = zip(names, self.ranks.tolist(), self.adapter_bytes.tolist(), strict=True)
        return [AdapterRef(name=name, digest=name, rank=rank, size_bytes=size_bytes) for name, rank, size_bytes in columns]

    def request(self, index: int) -> Request:
        """The request at this place in the order of arrival."""
        return next(self._between(index, index + 1))

    def _between(self, begin: int, end: int) -> Iterator[Request]:
        part = slice(begin, end)
        columns = [column[part].tolist() for column in (self.arrival_s, self.adapter, self.prompt_tokens, self.output_tokens)]
        which = self.slo[part].tolist() if self.slo is not None else repeat(0)
        begins = self.prefix[part] if self.prefix is not None else repeat(())
        whose = self.tenant[part].tolist() if self.tenant is not None else repeat(0)
        drawn = self.image[part].tolist() if self.image is not None else repeat(None)
        others = self.more[part] if self.more is not None else repeat(())
        rows = zip(count(begin), *columns, which, begins, whose, drawn, others, strict=False)  # endless ones among them
        adapters = self.adapters
        for index, arrival_s, adapter, prompt_tokens, output_tokens, slo, prefix, tenant, image, more in rows:
            name, weight = self.tenants[tenant]
            yield Request(
                index,
                round(arrival_s * PS_PER_S),
                adapters[adapter] if adapter >= 0 else BASE,
                prompt_tokens,
                output_tokens,
                self.slos[slo],
                prefix,
                self.prefix_tokens,
                name,
                weight,
                self.images[image] if image is not None else None,
                tuple([adapters[one] for one in more]) if more else (),
            )

    def until(self, end_s: float) -> Workload:
        """The requests that arrive before `end_s`."""
        return self.take(np.arange(np.searchsorted(self.arrival_s, end_s)))

    def faster(self, factor: float) -> Workload:
        """The same requests at `factor` times the rate."""
        return replace(self, arrival_s=self.arrival_s / factor)

    def take(self, rows: NDArray[np.intp]) -> Workload:
        """Some of the requests, given by ascending indices."""
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            adapter=self.adapter[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            slo=None if self.slo is None else self.slo[rows],
            prefix=None if self.prefix is None else [self.prefix[row] for row in rows.tolist()],
            tenant=None if self.tenant is None else self.tenant[rows],
            image=None if self.image is None else self.image[rows],
            more=None if self.more is None else [self.more[row] for row in rows.tolist()],
        )


# ---- when


@dataclass(frozen=True, slots=True)
class Intensity:
    """A rate over time in requests per second: constant between `edges_s` (one more than `rates`), which start at 0."""

    edges_s: Floats
    rates: Floats

    @classmethod
    def constant(cls, rate: float, duration_s: float) -> Intensity:
        return cls(np.array([0.0, duration_s]), np.array([rate]))

    @classmethod
    def diurnal(cls, rate: float, duration_s: float, *, period_s: float = 86_400.0, swing: float = 0.8) -> Intensity:
        """A cosine around `rate`, lowest at the start, between `rate * (1 - swing)` and `rate * (1 + swing)`."""
        edges = np.linspace(0.0, duration_s, 1 + max(1, round(200 * duration_s / period_s)))
        middle = (edges[1:] + edges[:-1]) / 2
        return cls(edges, rate * (1 - swing * np.cos(2 * np.pi * middle / period_s)))

    @classmethod
    def flash_crowd(cls, rate: float, duration_s: float, *, at_s: float, length_s: float, factor: float) -> Intensity:
        """`factor` times the rate for `length_s` from `at_s` on."""
        edges = np.array([0.0, at_s, at_s + length_s, max(duration_s, at_s + length_s)])
        return cls(edges, np.array([rate, rate * factor, rate]))

    def until(self, end_s: float) -> Intensity:
        """The same rates up to `end_s`, or to their end if that is earlier."""
        end_s = min(end_s, float(self.edges_s[-1]))
        edges = np.append(self.edges_s[self.edges_s < end_s], end_s)
        return Intensity(edges, self.rates[: len(edges) - 1])


def arrivals(rng: Generator, intensity: Intensity, *, cv: float = 1.0) -> Floats:
    """Ascending arrival times in seconds. `cv`: the coefficient of variation of the gaps at constant rate, at most `MAX_CV`."""
    if not 0.0 < cv <= MAX_CV:
        raise ValueError(f"a coefficient of variation of {cv:g} is not above 0 and up to {MAX_CV:g}")
    upto = np.concatenate([[0.0], np.cumsum(np.diff(intensity.edges_s) * intensity.rates)])
    shape = 1.0 / (cv * cv)
    gaps: list[Floats] = []
    total = 0.0
    while total < upto[-1]:
        chunk = rng.gamma(shape, 1.0 / shape, size=int(upto[-1] - total) + 64)
        gaps.append(chunk)
        total += float(chunk.sum())
    if not gaps:
        return np.zeros(0)
    events = np.cumsum(np.concatenate(gaps))
    return np.interp(events[events < upto[-1]], upto, intensity.edges_s)


# ---- for which adapter


def zipf(adapters: int, exponent: float = 1.0) -> Floats:
    """Shares of `adapters` adapters in proportion to 1 / place^exponent. They add up to 1."""
    shares = np.arange(1, adapters + 1, dtype=np.float64) ** -exponent
    return shares / shares.sum()


def pick(rng: Generator, shares: Floats, count: int) -> Ints:
    """`count` adapter indices, drawn by share."""
    return np.searchsorted(np.cumsum(shares / shares.sum())[:-1], rng.random(count), side="right").astype(np.int64)


def rank_mix(rng: Generator, adapters: int, weights: Mapping[int, float]) -> Ints:
    """A rank per adapter, in random order. The numbers follow `weights` (rank -> weight) as exactly as possible."""
    ranks = np.array(sorted(weights))
    upto = np.cumsum([weights[rank] for rank in ranks.tolist()])
    return rng.permutation(ranks[np.searchsorted(upto, (np.arange(adapters) + 0.5) / adapters * upto[-1])]).astype(np.int64)


def per_adapter(rng: Generator, rates: Floats, duration_s: float, *, cv: float = 1.0) -> tuple[Floats, Ints]:
    """One independent process per adapter with its own rate, merged: (arrival times, adapter indices)."""
    times = [arrivals(rng, Intensity.constant(float(rate), duration_s), cv=cv) for rate in rates]
    adapter = np.repeat(np.arange(len(rates)), [len(part) for part in times])
    merged = np.concatenate(times) if times else np.zeros(0)
    order = np.argsort(merged, kind="stable")
    return merged[order], adapter[order]


# ---- with how many tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs of prompt and output length in tokens. `draw` picks pairs with replacement."""

    prompt_tokens: Ints
    output_tokens: Ints

    @classmethod
    def lognormal(
        cls, rng: Generator, *, prompt_mean: float, output_mean: float, prompt_cv: float = 1.0, output_cv: float = 1.0
    ) -> Lengths:
        """A pool of 20,000 pairs, with prompt and output lengths independent of each other."""
        columns = []
        for mean, cv in ((prompt_mean, prompt_cv), (output_mean, output_cv)):
            sigma = np.sqrt(np.log1p(cv * cv))
            columns.append(np.maximum(1, np.rint(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 20_000))).astype(np.int64))
        return cls(*columns)

    def draw(self, rng: Generator, count: int) -> tuple[Ints, Ints]:
        """(prompt tokens [count], output tokens [count])."""
        rows = rng.integers(len(self.prompt_tokens), size=count)
        return self.prompt_tokens[rows], self.output_tokens[rows]

    def capped(self, prompt_tokens: int, total_tokens: int) -> Lengths:
        """The pairs without those whose prompt is longer than `prompt_tokens` or whose sum is above `total_tokens`."""
        fits = (self.prompt_tokens <= prompt_tokens) & (self.prompt_tokens + self.output_tokens <= total_tokens)
        return Lengths(self.prompt_tokens[fits], self.output_tokens[fits])
