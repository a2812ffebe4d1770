"""Cells of the lower bound (`bound`): ranges of a worker's state, and what a worker in each can serve at best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from motet.policies.plan.capacity import BATCHES, LEAST_STIFFNESS, SLOTS_Z, Mix, Settings
from motet.policies.plan.demand import Demand, Floats
from motet.policies.plan.fleet import Kind, Rows
from motet.policies.plan.latencies import SHARES, deviations, most_of

RANGES = ("batch", "used", "adapters")
FINE = np.array([1.04, 1.12, 1.25])
"""Ratios of the ends of each range below which cells are not divided. What a worker can do depends most on the first."""
COARSE = 2.0
LEAST = 0.25
"""Running requests, and adapters in use, below which ranges are not divided."""
REACH = 3.5
"""Time at which misses are counted, relative to that in which as many requests come as there are slots."""
NEVER = 1e9
"""In place of what an adapter needs of a worker that cannot serve it."""
ROWS = 8


@dataclass(slots=True)
class Cells:
    """Ranges of workers' states: running requests, adapters in use, adapters. Columns are [cells], ranges [cells, 2]."""

    kind: Rows
    setting: Rows
    batch: Floats
    used: Floats
    adapters: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: Rows) -> Cells:
        """Some of them."""
        return Cells(*(getattr(self, field.name)[rows] for field in fields(self)))

    def wide(self) -> NDArray[np.bool_]:
        """Whether a range is not fine, [cells]."""
        return np.asarray((self._widths() > 1.0).any(axis=1))

    def _widths(self) -> Floats:
        """Of each range, as the number of times that it is `FINE`, [cells, RANGES]."""
        ranges = np.stack([getattr(self, name) for name in RANGES], axis=1)
        return np.asarray(np.log(np.maximum(ranges[:, :, 1], LEAST) / np.maximum(ranges[:, :, 0], LEAST)) / np.log(FINE))

    def divided(self) -> tuple[Cells, Rows]:
        """Each cell in two along its widest ranges, and from which cell each part is."""
        cells, parents = self, np.arange(len(self))
        widths = self._widths()
        divide = (widths > 1.0) & (widths >= 0.5 * widths.max(axis=1, keepdims=True))
        for at, name in enumerate(RANGES):
            ranges = getattr(cells, name)
            wide = np.flatnonzero(divide[parents, at])
            middle = np.sqrt(np.maximum(ranges[wide, 0], LEAST) * ranges[wide, 1])
            below, above = ranges.copy(), ranges[wide]
            below[wide, 1] = middle
            above[:, 0] = middle
            rows = np.concatenate([np.arange(len(cells)), wide])
            cells, parents = cells.take(rows), parents[rows]
            setattr(cells, name, np.concatenate([below, above]))
        return cells, parents


def joined(parts: Sequence[Cells]) -> Cells:
    """All cells of the parts."""
    return Cells(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Cells)))


def first(of: Demand, at: int, kind: Kind) -> Cells:
    """Coarse cells of the kind with index `at`, which together hold every state that its limits allow."""
    most = _batch_most(of, kind.settings)
    z = np.broadcast_to(kind.limits.z, len(most))
    busiest = _busiest(most, z, of.peakedness)
    adapters = of.adapters
    found = list[tuple[float, ...]]()
    for setting, slots in enumerate(kind.settings.slots.tolist()):
        if most[setting] < 1.0 or busiest[setting] <= 0.0:
            continue
        for batch in _ranges(2.0, float(busiest[setting])):
            for used in _ranges(2.0, min(slots, batch[1], adapters)):
                fit = [one for one in _ranges(8.0, min(slots, adapters), 4.0) if one[1] >= used[0]]
                beyond = _ranges(slots, adapters)[1:] if adapters > slots else []
                found += [(at, setting, *batch, *used, *served) for served in (*fit, *beyond)]
    columns = np.array(found, dtype=np.float64).reshape(-1, 8)
    whole = columns[:, :2].astype(np.intp)
    return Cells(whole[:, 0], whole[:, 1], columns[:, 2:4], columns[:, 4:6], columns[:, 6:8])


def _ranges(begin: float, end: float, ratio: float = COARSE) -> list[tuple[float, float]]:
    """[0, begin], and from there to `end` in steps of `ratio`."""
    edges = [0.0, min(begin, end)]
    while edges[-1] < end:
        edges.append(min(edges[-1] * ratio, end))
    return list(pairwise(edges))


def _busiest(most: Floats, z: Floats, swell: float | Floats) -> Floats:
    """The number of requests B of which `most_of`, with the variance swell B, is `most`; 0 if there is none."""
    half = 0.5 * z * np.sqrt(swell)
    return (np.sqrt(np.maximum(half**2 + most - _beyond(z), half**2)) - half) ** 2


def _beyond(z: Floats) -> Floats:
    """What `latencies.most_of` adds to a mean and z deviations."""
    return most_of(np.zeros(len(z)), np.zeros(len(z)), z)


def _context(of: Demand) -> Floats:
    """KV tokens of a running request, on average."""
    return of.prompt_tokens + of.output_square / (2.0 * of.output_tokens)


def _batch_most(of: Demand, settings: Settings) -> Floats:
    """The largest batch with the lengths that need the least room, [settings]."""
    held = float(_context(of).min()) + settings.block_tokens / 2 + settings.headroom_tokens
    ratio = float((of.prompt_tokens / of.output_tokens).min())
    most = np.maximum(settings.kv_tokens - float(of.prompt_tokens.min()), 0.0) / held
    return np.minimum(most, min(settings.seats, settings.step_tokens / (1.0 + ratio)))


class States:
    """Workers of one kind at their best, by cells.

    `step_ms` [settings, COEFFICIENTS, BATCHES, classes]: steps are affine in the adapters in use, each in the adapters served.
    """

    def __init__(self, of: Demand, kind: Kind) -> None:
        self.of, self.kind = of, kind
        settings = kind.settings
        self.batch_most = _batch_most(of, settings)
        self.batches = self.batch_most[:, None] * BATCHES
        copies = np.broadcast_to(settings.steps.copy_ms(of), (len(settings), len(of)))[:, of.rank > 0]
        self.copy_s = copies.min(axis=1, initial=np.inf if copies.size else 0.0) * 1e-3
        self.copy_most_s = copies.max(axis=1, initial=0.0) * 1e-3
        alike, which = np.unique(np.stack([of.prompt_tokens, of.output_tokens, of.rank]), axis=1, return_inverse=True)
        self.which = which.ravel()  # of the lengths and ranks, for each class
        self.step_s, self.mixed_s = self._tables(alike)

    def _tables(self, alike: Floats) -> tuple[Floats, Floats]:
        """(mean steps, steps with prompts) where all requests are alike.

        [settings, 5, batches, alike]: without adapters, and the coefficients of 1, n, A and n A. [settings, batches, alike].
        """
        found = []
        for prompt, output, rank in alike.T.tolist():
            values = [self._steps(n, served, prompt, output, rank) for n, served in ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1))]
            none, one, two, one_served, two_served = (step_s for step_s, _ in values)
            per_both = (two_served - one_served) - (two - one)
            per_served = one_served - one - per_both
            found.append((np.stack([none, 2 * one - two, two - one, per_served, per_both], axis=1), values[0][1]))
        steps, mixed = zip(*found, strict=True)
        return np.stack(steps, axis=-1), np.stack(mixed, axis=-1)

    def _steps(self, used: float, served: float, prompt: float, output: float, rank: float) -> tuple[Floats, Floats]:
        """(mean step, step with prompts) in seconds, [settings, batches]."""
        of, batches = self.of, self.batches
        with_prompts = -np.expm1(-batches / output)
        begin = batches / (output * with_prompts)
        one = np.ones((1, 1))
        mix = Mix(
            rows=batches,
            context_tokens=batches * float(_context(of).min()),
            distinct=np.full_like(batches, used),
            adapter_bytes=np.full_like(batches, used * float(of.size_bytes.min())),
            rank=one * rank,
            max_rank=one * rank,
            adapters=one * served,
        )
        decode_ms = self.kind.settings.steps.step_ms(mix)
        mixed_ms = self.kind.settings.steps.step_ms(replace(mix, prompt_tokens=begin * prompt, prompts=begin))
        return ((1.0 - with_prompts) * decode_ms + with_prompts * mixed_ms) * 1e-3, mixed_ms * 1e-3

    def rows(self, cells: Cells) -> Floats:
        """What an adapter of each class needs of a worker, as shares of what the worker has, [cells, ROWS, classes]."""
        of, settings = self.of, self.kind.settings.take(cells.setting)
        limits = self.kind.limits.at(cells.setting)
        step_s, slow_s = self._at(cells, 0), self._at(cells, 1)
        z = np.broadcast_to(limits.z, len(cells))
        stiffness, row_s = self._stiffness(cells, step_s, slow_s, self._within(cells, step_s)[1])
        low, high = cells.batch.T
        busiest = np.maximum(_busiest(self.batch_most[cells.setting], z, of.peakedness / stiffness), LEAST)
        never = busiest < low
        cells = replace(cells, batch=np.stack([low, np.clip(high, low, np.maximum(busiest, low))], axis=1))
        inside_s, within = self._within(cells, step_s)
        token_s = inside_s.min(axis=(1, 2))
        tokens, lora = of.rate * of.output_tokens, (of.rank > 0).astype(np.float64)
        used = lora * -np.expm1(-np.multiply.outer(token_s, tokens))
        root = np.minimum(SLOTS_Z * z / np.sqrt(stiffness * np.maximum(_variance_most(cells), 1.0)), 1.0)[:, None]
        slots = settings.slots
        scarce = cells.adapters[:, 1] > slots
        missed = self._missed(cells, token_s, np.where(scarce & self.kind.settings.steps.stalls, slots, np.inf))
        rows = np.empty((len(cells), ROWS, len(of)))
        used_s, used_most_s = self._used_s(cells, slow_s, within)
        served, room = self._served(cells, step_s)
        served, room = served + used_s[:, None] * used, room + used_s * cells.used[:, 0]
        none = np.zeros(len(cells))
        rows[:, 0] = self._with_copies(served, room, none, missed)
        rows[:, 1] = self._with_copies(served, room, self.copy_s[cells.setting] * room, missed)
        busy, room, copied = self._busy(cells, step_s, token_s, slots, used_most_s, np.broadcast_to(limits.busy, len(cells)))
        rows[:, 2] = self._with_copies(busy, room, none, missed)
        rows[:, 3] = self._with_copies(busy, room, copied, missed)
        rows[:, 4] = used / np.maximum(cells.used[:, 1], 1e-9)[:, None]
        free = np.where(scarce, np.maximum(slots - _beyond(SLOTS_Z * z), 1e-9), np.inf)
        rows[:, 5] = used * (1.0 + root * (1.0 - used)) / free[:, None]
        rows[:, 6] = used * of.size_bytes / settings.adapter_bytes[:, None]
        rows[:, 7] = lora / cells.adapters[:, 1][:, None]
        latency = np.broadcast_to(limits.latency, len(cells))
        mixed_s = np.where(within, self.mixed_s[cells.setting], np.inf).min(axis=(1, 2))
        deviation = np.sqrt(of.peakedness * low / stiffness)
        wave_s = deviations(np.clip(of.share.min(), *SHARES)) * row_s * deviation
        tpot_ms, ttft_ms = (token_s + wave_s) * 1e3 / latency, (token_s + mixed_s + wave_s) * 1e3 / latency
        never = never[:, None] | (tpot_ms[:, None] > of.tpot_slo_ms) | (ttft_ms[:, None] > of.ttft_slo_ms)
        never |= (of.rank > settings.max_rank[:, None]) | (of.size_bytes > settings.adapter_bytes[:, None])
        return np.where(never[:, None, :], NEVER, rows)

    def _stiffness(self, cells: Cells, step_s: Floats, slow_s: Floats, within: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """(at most the stiffness, at least the seconds that one more request adds to a step) of each cell."""
        batches = self.batches[cells.setting][:, :, None]
        row_s = np.gradient(step_s, axis=1) / np.gradient(batches, axis=1)
        stiffness = np.clip(1.0 - batches * row_s / slow_s, LEAST_STIFFNESS, 1.0)
        least_s = np.where(within, row_s, np.inf).min(axis=(1, 2))
        return np.where(within, stiffness, 0.0).max(axis=(1, 2)), np.maximum(least_s, 0.0)

    def _at(self, cells: Cells, end: int) -> Floats:
        """Steps with the least (0) or the most (1) adapters of the cells, seconds [cells, batches, alike]."""
        used, served = (ranges[:, end][:, None, None] for ranges in (cells.used, cells.adapters))
        none, fixed, per_used, per_served, per_both = np.moveaxis(self.step_s[cells.setting], 1, 0)
        some = fixed + per_used * used + (per_served + per_both * used) * served
        return np.asarray(np.where(used > 0, some, np.minimum(none, some)))

    def _within(self, cells: Cells, step_s: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """(steps at the ends of the cells' batches and between, whether a batch is next to those of its cell)."""
        low, high = cells.batch[:, 0][:, None], cells.batch[:, 1][:, None]
        batches = self.batches[cells.setting]
        between = (batches >= low) & (batches <= high)
        ends = np.stack([_interpolated(step_s, cells.batch[:, end] / self.batch_most[cells.setting]) for end in (0, 1)], axis=1)
        inside_s = np.concatenate([np.where(between[:, :, None], step_s, np.inf), ends], axis=1)
        near = np.zeros_like(between)
        near[:, :-1] = (batches[:, 1:] > low) & (batches[:, :-1] < high)
        near[:, 1:] |= near[:, :-1]
        near[:, 0] |= ~near.any(axis=1)
        return inside_s, near[:, :, None]

    def _served(self, cells: Cells, step_s: Floats) -> tuple[Floats, Floats]:
        """(needs, room) of the time of a batch where a worker runs the most requests, [cells, classes] and [cells]."""
        batches = self.batches[cells.setting][:, :, None]
        rates = np.maximum.accumulate(batches / step_s, axis=1)
        most = cells.batch[:, 1]
        rate = _interpolated(rates, most / self.batch_most[cells.setting])
        return self.of.rate * self.of.output_tokens * most[:, None] / rate[:, self.which], most

    def _used_s(self, cells: Cells, slow_s: Floats, within: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """What one more adapter in use takes of the requests' time at least: in a cell, and at the largest batch, [cells].

        A request of the batch waits for it once in each step.
        """
        low, high = cells.batch.T
        slowest_s = self._within(cells, slow_s)[0]
        slowest_s = np.where(np.isfinite(slowest_s), slowest_s, 0.0).max(axis=(1, 2))
        slowest_s = slowest_s + self.copy_most_s[cells.setting] * high / float(self.of.output_tokens.min())
        per_used = self.step_s[cells.setting, 2] + self.step_s[cells.setting, 4] * cells.adapters[:, :1, None]
        pace = low / slowest_s  # requests that get a token, per second
        inside_s = np.where(within, per_used, np.inf).min(axis=(1, 2))
        return pace * np.maximum(inside_s, 0.0), pace * np.maximum(per_used[:, -1].min(axis=1), 0.0)

    def _busy(
        self, cells: Cells, step_s: Floats, token_s: Floats, slots: Floats, used_s: Floats, busy: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """(needs, room, time of copies) of the share of the capacity that a worker may use.

        The capacity is that of the largest batch in almost all cells. More adapters are in use there than in the cell.
        """
        of, most = self.of, self.batch_most[cells.setting]
        tokens = of.rate * of.output_tokens
        rates = self.batches[cells.setting][:, :, None] / step_s
        last = (rates.argmax(axis=1) == rates.shape[1] - 1).all(axis=1)
        best_s = (most[:, None] / rates.max(axis=1))[:, self.which]
        low, high = cells.batch.T
        used_s = used_s * last
        in_use = (of.rank > 0) * -np.expm1(-np.multiply.outer(token_s * most / high, tokens))
        fits = cells.adapters[:, 1] <= slots
        held = np.where(fits, 1.0, np.minimum(1.0, slots / (cells.used[:, 1] * most / np.maximum(low, LEAST))))
        needs = tokens * best_s + (used_s * held)[:, None] * in_use
        return needs, busy * most + used_s * cells.used[:, 0], np.where(last, self.copy_s[cells.setting] * most, 0.0)

    def _missed(self, cells: Cells, token_s: Floats, slots: Floats) -> tuple[Floats, Floats]:
        """(a, b): requests/s that wait for copies are at least sum_c a_c x_c - b, [cells, classes] and [cells].

        In t seconds h(t) = sum_c x_c (1 - exp(-l_c t)) adapters are asked for; the device holds those of t* seconds. h is
        concave, so h'(t*), the rate of misses, is at least (h(t) - slots) / t for every t > t*.
        """
        of, some = self.of, np.isfinite(slots)
        rate = cells.batch[:, 1] / (token_s * of.mean(of.output_tokens))
        room = np.where(some, slots, 1.0)
        time_s = REACH * room / rate
        asked = (of.rank > 0) * -np.expm1(-np.multiply.outer(time_s, of.rate)) / time_s[:, None]
        return np.where(some[:, None], asked, 0.0), np.where(some, room / time_s, 0.0)

    @staticmethod
    def _with_copies(needs: Floats, room: Floats, copy_s: Floats, missed: tuple[Floats, Floats]) -> Floats:
        """Needs as shares of the room, where each request that waits for a copy takes `copy_s` of it."""
        return np.asarray((needs + copy_s[:, None] * missed[0]) / (room + copy_s * missed[1])[:, None])


def _variance_most(cells: Cells) -> Floats:
    """The largest sum of u (1 - u) of the adapters, where their u add up to n: n - n^2 / A, where all are alike, [cells]."""
    most = cells.adapters[:, 1]
    used = np.clip(0.5 * most, *cells.used.T)
    return np.asarray(used * (1.0 - np.minimum(1.0, used / most)))


def _interpolated(values: Floats, share: Floats) -> Floats:
    """`values` [cells, BATCHES, ...] at shares of the largest batch, [cells, ...]."""
    after = np.clip(np.searchsorted(BATCHES, share), 1, len(BATCHES) - 1)
    part = np.clip((share - BATCHES[after - 1]) / (BATCHES[after] - BATCHES[after - 1]), 0.0, 1.0)[:, None]
    at = np.arange(len(values))
    return np.asarray(values[at, after - 1] * (1.0 - part) + values[at, after] * part)
