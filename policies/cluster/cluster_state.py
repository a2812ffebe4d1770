"""The state of all workers, in arrays, so that a decision costs a few array operations for any number of workers.

The sums and maxima that decisions need are updated as requests come and go, never recounted:

    change_requests -> WorkerLoad (per worker, plain Python) -> the worker's row (`worker_table`) -> decide() reads columns

Residency is indexed by adapter (`holders`), since a decision asks for one adapter on all workers; cached KV blocks by their key
(`prefix_index`).

Freed rows are reused, and the table doubles when it is full. Pure: callers interpret messages and pass facts and times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.policies.cluster.holders import AdapterIndex, Holders, HomeIndex, place_bits
from motet.policies.cluster.prefix_index import PrefixIndex
from motet.policies.cluster.worker_load import WorkerLoad
from motet.policies.cluster.worker_table import (
    CAPABILITY_BITS,
    COLUMNS,
    MIN_STEP_MS,
    PERF,
    PerfColumns,
    capability_bits,
    free_rows,
    hash_of,
)
from motet.policies.memory.kv_blocks import merged_short, told_tokens
from motet.policies.memory.kv_travel import MOST_BYTES, SURE
from motet.policies.times.perf_model import MIB, Floats
from motet.shared.model import EXCLUSIVE_CAPABILITIES, PerfModel, RequestBrief, Tier, WorkerLimits
from motet.shared.wire.prefixes import PrefixKeys, unpack_keys

CHANGES_KEPT = 1024
"""Different lists of adapters' layers whose workers are remembered."""
_ANY = 1 << 40  # tokens, or a rank, above all
_ONLY = frozenset(EXCLUSIVE_CAPABILITIES)


class Beginning(NamedTuple):
    """`rows` have the first `tokens` tokens of a prompt, and no more. `last_key`: of the last of these blocks."""

    rows: NDArray[np.intp]
    tokens: int
    last_key: int
    merged: bool  # blocks of an adapter that is merged into these workers' weights


class ClusterState:
    """All workers of a scheduler. Policies read `table`: one element per worker, and some free ones (`base` is -1)."""

    def __init__(self) -> None:
        self.table = free_rows(16)
        self.ids: list[str] = [""] * 16
        self._row: dict[str, int] = {}
        self._terms: dict[str, tuple[WorkerLimits, PerfModel]] = {}  # as they are in the table
        self._free = list(range(15, -1, -1))
        self._loads: dict[str, WorkerLoad] = {}
        self._adapters: dict[str, dict[str, Tier]] = {}  # worker id -> digest -> tier
        self._index = AdapterIndex()
        self.prefixes = PrefixIndex()
        self.homes = HomeIndex()
        self._at_home: dict[str, tuple[str, ...]] = {}  # worker id -> adapters, of absent workers, too
        self._merged: dict[int, str] = {}  # row -> the adapter that is merged into its weights
        self._bases: dict[str, int] = {}
        self._formats: dict[str, int] = {"": 0}  # of KV blocks
        self.found: Any = None
        """What the last question's prompt found (`cached_prompt.find`)."""
        self.held_back: set[int] = set()  # the rows that are draining or refusing
        self.exclusive: set[int] = set()  # the rows that take only requests of one kind
        self.crowded: set[int] = set()  # the rows without a free seat
        self.slotted: set[int] = set()  # the rows of workers that say how many slots they have
        self._perf: PerfColumns | None = None  # this and the next ones are computed on demand, see `_forget_derived`
        self._travel_gain: Floats | None = None
        self._least: tuple[int, int] | None = None
        self._serving: dict[int, NDArray[np.bool_]] = {}
        self._alike: dict[str, float | None] = {}
        self._changes: dict[tuple[str, ...], NDArray[np.bool_]] = {}  # by an adapter's layers
        self._oldest_s = inf  # every worker has been heard at this time or later

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._row

    def __len__(self) -> int:
        return len(self._row)

    def workers(self) -> list[str]:
        """Every worker's id."""
        return list(self._row)

    def serving(self, base_model: str) -> NDArray[np.bool_]:
        """The rows of the workers with this base model. The caller must not change the array."""
        base = self._bases.get(base_model)
        if base is None:
            return np.zeros(len(self.ids), dtype=bool)
        if base not in self._serving:
            self._serving[base] = self.table["base"] == base
        return self._serving[base]

    def base_model(self, base: int) -> str:
        """The name behind a number in the column `base`."""
        return next(name for name, number in self._bases.items() if number == base)

    @property
    def perf(self) -> PerfColumns:
        """The coefficients in `table`."""
        if self._perf is None:
            self._perf = PerfColumns(self.table)
        return self._perf

    @property
    def least(self) -> tuple[int, int]:
        """Tokens and LoRA rank that every worker can accept."""
        if self._least is None:
            t, used = self.table, self.table["base"] >= 0
            context = np.minimum(t["max_model_len"], t["kv_tokens_total"])
            self._least = int(context[used].min(initial=_ANY)), int(t["max_lora_rank"][used].min(initial=_ANY))
        return self._least

    def alike(self, name: str) -> float | None:
        """The value that a column of limits has for every worker; None when they differ."""
        if name not in self._alike:
            values = self.table[name][self.table["base"] >= 0]
            self._alike[name] = float(values[0]) if len(values) and (values == values[0]).all() else None
        return self._alike[name]

    def changes_layers(self, targets: tuple[str, ...]) -> NDArray[np.bool_]:
        """The rows of workers that can change all these layers of their base with an adapter."""
        if targets not in self._changes:
            if len(self._changes) >= CHANGES_KEPT:
                self._changes.clear()
            able = np.zeros(len(self.ids), dtype=bool)
            for worker_id, (limits, _) in self._terms.items():
                able[self._row[worker_id]] = frozenset(targets) <= frozenset(limits.lora_targets)
            self._changes[targets] = able
        return self._changes[targets]

    def lacking_layers(self, targets: tuple[str, ...], rows: NDArray[np.bool_]) -> tuple[str, ...]:
        """Those of the layers that none of the workers in these rows can change."""
        if not targets:
            return ()
        known = {
            one for worker_id, (limits, _) in self._terms.items() if rows[self._row[worker_id]] for one in limits.lora_targets
        }
        return tuple(one for one in targets if one not in known)

    def row(self, worker_id: str) -> int:
        """The worker's index in the columns of `table`, -1 when it is not known."""
        return self._row.get(worker_id, -1)

    def requests(self, worker_id: str) -> Mapping[str, RequestBrief]:
        """The worker's requests by id."""
        return self._loads[worker_id].requests

    def load(self, row: int) -> WorkerLoad:
        """The requests of the worker in this row of `table`, counted by objective and by tenant."""
        return self._loads[self.ids[row]]

    def adapters(self, worker_id: str) -> Mapping[str, Tier]:
        """The adapters that the worker holds and the fastest tier each is in."""
        return self._adapters[worker_id]

    def beginnings(self, prompt: Iterable[PrefixKeys], adapter: str) -> list[Beginning]:
        """Which workers have how much of a prompt for this adapter; each worker is in one of them at most."""
        found: list[Beginning] = []
        merged = self.merged_rows(adapter)
        for part in prompt:
            keys = unpack_keys(part.keys)
            for depth in self.prefixes.depths(keys):
                rows = np.setdiff1d(depth.rows, merged) if merged else depth.rows
                found.append(Beginning(rows, depth.keys * part.tokens, keys[depth.keys - 1], merged=False))
            if merged:
                others = [merged_short(key) for key in keys]
                for depth in self.prefixes.depths(others):
                    rows = np.intersect1d(depth.rows, merged)
                    found.append(Beginning(rows, depth.keys * part.tokens, others[depth.keys - 1], merged=True))
        return found

    def merged_rows(self, adapter: str) -> list[int]:
        """The rows of the workers that have this adapter merged into their weights."""
        return [row for row, digest in self._merged.items() if digest == adapter]

    def merge(self, worker_id: str, adapter: str) -> None:
        """The worker has this adapter merged into its weights, "" for none: its blocks have keys of their own."""
        if adapter:
            self._merged[self._row[worker_id]] = adapter
        else:
            self._merged.pop(self._row[worker_id], None)
        self.found = None

    def list_prefixes(self, worker_id: str, keys: Iterable[int]) -> None:
        """The worker has the KV blocks with these keys cached, and no others."""
        row = self._row[worker_id]
        self.prefixes.forget(row)
        self.prefixes.add(row, keys)

    def expect_prefixes(self, worker_id: str, prompt: Iterable[PrefixKeys], now_s: float) -> None:
        """The worker is about to have the blocks of this prompt, of an adapter that is not merged there."""
        row, (limits, _) = self._row[worker_id], self._terms[worker_id]
        for part in prompt:
            if limits.prefix_cache and part.tokens == told_tokens(limits.block_size):
                self.prefixes.expect(row, unpack_keys(part.keys), now_s)

    def disappoint_prefixes(self, worker_id: str, prompt: Iterable[PrefixKeys]) -> None:
        """It will not have them: it did not take the request."""
        row = self._row.get(worker_id, -1)
        for part in prompt:
            self.prefixes.disappoint(row, unpack_keys(part.keys))

    def holders(self, digest: str) -> Holders | None:
        """The workers that hold the adapter; None when no worker does."""
        return self._index.of(digest)

    def put_homes(self, worker_id: str, digests: Iterable[str]) -> None:
        """These adapters are at home on the worker, and no others, also when it is not here yet, or again."""
        self._at_home[worker_id] = found = tuple(digests)
        if not found:
            del self._at_home[worker_id]
        if worker_id in self._row:
            self.homes.put(self._row[worker_id], found)

    # ---- workers

    def put_worker(self, worker_id: str, limits: WorkerLimits, perf: PerfModel) -> None:
        """Add a worker, or renew the limits and coefficients of a known one."""
        row = self._row.get(worker_id)
        if row is None:
            row = self._take_row()
            self._row[worker_id], self.ids[row] = row, worker_id
            self._loads[worker_id], self._adapters[worker_id] = WorkerLoad(), {}
            self.homes.put(row, self._at_home.get(worker_id, ()))
            self.table["key"][row] = hash_of(worker_id)
            self.table["kv_tokens_free"][row] = 0.0  # until it is heard
            self._oldest_s = -inf
        old_limits, old_perf = self._terms.get(worker_id, (None, None))
        if limits == old_limits and perf == old_perf:
            return
        self._terms[worker_id] = limits, perf
        if limits != old_limits:
            self._put_limits(row, limits)
        if perf != old_perf:
            self._put_perf(row, perf)
        self._put_travel(row, limits, perf)
        self._write_times(row, worker_id, self._loads[worker_id])

    def terms(self, worker_id: str) -> tuple[WorkerLimits, PerfModel]:
        """Limits and coefficients of a known worker."""
        return self._terms[worker_id]

    def _put_limits(self, row: int, limits: WorkerLimits) -> None:
        t = self.table
        t["base"][row] = self._bases.setdefault(limits.base_model, len(self._bases))
        t["max_model_len"][row] = limits.max_model_len
        t["max_lora_rank"][row] = limits.max_lora_rank
        t["capabilities"][row] = capability_bits(word for word in limits.capabilities if word in CAPABILITY_BITS)
        (self.exclusive.discard if _ONLY.isdisjoint(limits.capabilities) else self.exclusive.add)(row)
        t["max_running"][row] = limits.max_running
        t["max_requests"][row] = limits.max_running + limits.max_waiting
        t["block_size"][row] = limits.block_size
        t["kv_tokens_total"][row] = limits.kv_blocks_most * limits.block_size
        (self.slotted.add if limits.adapter_slots else self.slotted.discard)(row)
        t["adapter_slots"][row] = limits.adapter_slots or inf
        self._count_slots(row)
        t["copies_stall"][row] = limits.copies == "stall"
        t["copies_wait"][row] = limits.copies != "bridged"
        self._forget_derived()

    def _put_perf(self, row: int, perf: PerfModel) -> None:
        self.table["bgmv"][row] = perf.kernel == "bgmv"
        for name in PERF:
            self.table[name][row] = getattr(perf, name)
        self._perf = None

    def _put_travel(self, row: int, limits: WorkerLimits, perf: PerfModel) -> None:
        """Write how the worker fetches KV blocks. Without a measured link it does not."""
        t, token_bytes = self.table, limits.kv_token_bytes
        travels = bool(limits.kv_format and token_bytes > 0 and perf.kv_ms_per_mib > 0)
        t["kv_format"][row] = self._formats.setdefault(limits.kv_format, len(self._formats))
        t["kv_base_ms"][row] = perf.kv_base_ms
        t["kv_token_ms"][row] = perf.kv_ms_per_mib * token_bytes / MIB if travels else 0.0
        t["kv_tokens_most"][row] = MOST_BYTES // token_bytes if travels else 0.0
        self._travel_gain = self.found = None

    @property
    def travel_gain(self) -> Floats:
        """Milliseconds that each fetched token of a prompt saves on each worker, less a margin; 0 or less for none."""
        if self._travel_gain is None:
            t = self.table
            self._travel_gain = np.where(t["kv_token_ms"] > 0.0, SURE * t["prefill_token_ms"] - t["kv_token_ms"], 0.0)
        return self._travel_gain

    def drop_worker(self, worker_id: str) -> None:
        """Remove a worker with its requests and adapters; unknown ids are ignored."""
        row = self._row.pop(worker_id, None)
        if row is None:
            return
        del self._terms[worker_id]
        load, adapters = self._loads.pop(worker_id), self._adapters.pop(worker_id)
        for digest in load.adapters.keys() | adapters.keys():
            self._index.mark(digest, row, 0)
        for name, (_, empty) in COLUMNS.items():
            self.table[name][row] = empty
        self.ids[row] = ""
        self._free.append(row)
        self.prefixes.forget(row)
        self._merged.pop(row, None)
        self.homes.forget(row)
        self.held_back.discard(row)
        self.exclusive.discard(row)
        self.crowded.discard(row)
        self.slotted.discard(row)
        self._forget_derived()

    def heard(
        self, worker_id: str, now_s: float, *, kv_blocks_free: int, draining: bool, adapter_bytes_free: float = inf
    ) -> None:
        """Take in a worker's latest facts and clear its marks (unresponsive, refusing)."""
        row, t = self._row[worker_id], self.table
        t["heard_s"][row] = now_s
        if now_s < self._oldest_s:
            self._oldest_s = now_s
        t["kv_tokens_free"][row] = kv_blocks_free * t["block_size"][row]
        t["adapter_bytes_free"][row] = adapter_bytes_free
        if row in self.held_back:
            t["draining"][row] = t["refusing"][row] = False
            self.held_back.remove(row)
        if draining:
            self.set_draining(worker_id)

    def set_heard(self, worker_id: str, heard_s: float) -> None:
        """Set the time of the worker's last message, and change nothing else."""
        self.table["heard_s"][self._row[worker_id]] = heard_s
        self._oldest_s = min(self._oldest_s, heard_s)

    def all_heard_since(self, since_s: float) -> bool:
        """Whether no worker has been silent since then."""
        if self._oldest_s < since_s:
            self._oldest_s = float(self.table["heard_s"][self.table["base"] >= 0].min(initial=inf))
        return self._oldest_s >= since_s

    def set_refusing(self, worker_id: str) -> None:
        """Mark a worker as out of room, until its next message."""
        self._hold_back("refusing", worker_id)

    def set_draining(self, worker_id: str) -> None:
        """Mark a worker as draining, until its next message."""
        self._hold_back("draining", worker_id)

    def _hold_back(self, reason: str, worker_id: str) -> None:
        row = self._row[worker_id]
        self.table[reason][row] = True
        self.held_back.add(row)

    # ---- their requests

    def replace_requests(self, worker_id: str, briefs: Iterable[RequestBrief], now_s: float = 0.0) -> None:
        """Replace the worker's requests by these, reported at `now_s`."""
        requests = {brief.request_id: brief for brief in briefs}  # a request that is listed twice counts once
        load = self._loads[worker_id]
        if load.progress(requests):
            self._write_running_left(worker_id, load)
            return
        new = WorkerLoad()
        new.uneven = load.uneven
        for brief in requests.values():
            new.add(brief)
        self._loads[worker_id] = new
        for digest in load.adapters.keys() ^ new.adapters.keys():
            self._locate(worker_id, digest)
        self._write(worker_id, new, now_s, opens=not load.queue.size)

    def put_request(self, worker_id: str, brief: RequestBrief, now_s: float = 0.0) -> None:
        """Add or change one of the worker's requests, as of `now_s`."""
        self.change_requests(worker_id, (brief,), (), now_s)

    def drop_request(self, worker_id: str, request_id: str) -> None:
        """Remove one of the worker's requests; unknown ids are ignored."""
        self.change_requests(worker_id, (), (request_id,), 0.0)

    def change_requests(
        self,
        worker_id: str,
        changed: Iterable[RequestBrief],
        removed: Iterable[str],
        now_s: float,
        running_left: int | None = None,
    ) -> None:
        """Add or change some of the worker's requests, then remove others, as of `now_s`; unknown ones are ignored.
        `running_left`: the worker's own count of output tokens that its running requests are still expected to produce."""
        load = self._loads[worker_id]
        adapters, queue = load.adapters, load.queue
        opens, began, same = not queue.size, False, True
        for brief in changed:
            digest = brief.adapter_digest
            in_use = digest in adapters
            old = load.put(brief)
            if not in_use:
                self._locate(worker_id, digest)
            if old is not None and old.adapter_digest not in adapters:
                self._locate(worker_id, old.adapter_digest)
            if load.uneven:
                self._locate_all(worker_id, (*brief.more, *(old.more if old is not None else ())))
            began = began or (brief.phase == "running" and (old is None or old.phase != "running"))
            opens, same = opens or not queue.size, False
        for request_id in removed:
            old = load.remove(request_id)
            if old is not None:
                same = False
                if old.adapter_digest not in adapters:
                    self._locate(worker_id, old.adapter_digest)
                if load.uneven:
                    self._locate_all(worker_id, old.more)
        if running_left is not None:
            load.running_left = running_left
        if same:
            self._write_running_left(worker_id, load)
            return
        if began:
            self.table["began_ms"][self._row[worker_id]] = 1000.0 * now_s
        self._write(worker_id, load, now_s, opens=opens)

    def _write_running_left(self, worker_id: str, load: WorkerLoad) -> None:
        row = self._row[worker_id]
        self.table["running_left"][row] = load.running_left
        self.table["kv_tokens_promised"][row] = load.kv_tokens_promised()

    def _write(self, worker_id: str, load: WorkerLoad, now_s: float, *, opens: bool) -> None:
        """Write a worker's aggregates to the table. `opens`: its queue was empty meanwhile."""
        row, t = self._row[worker_id], self.table
        exists, queue = load.exists, load.queue
        if not queue.size:
            t["opened_ms"][row] = -inf
        elif opens:
            t["opened_ms"][row] = 1000.0 * now_s
        if not exists.size:
            t["began_ms"][row] = -inf
        t["running"][row] = exists.size - queue.size
        t["running_left"][row] = load.running_left
        t["queued"][row] = queue.size
        t["queue_tokens"][row] = load.queue_tokens
        t["kv_tokens_promised"][row] = load.kv_tokens_promised()
        t["queue_rank_sum"][row] = queue.sum
        t["queue_max_rank"][row] = queue.max
        t["exists"][row] = exists.size
        if t["adapters_used"][row] != len(load.adapters):
            t["adapters_used"][row] = len(load.adapters)
            self._count_slots(row)
        t["rank_sum"][row] = exists.sum
        t["max_rank"][row] = exists.max
        t["tightest_tpot_ms"][row] = load.tightest
        if load.uneven:
            t["extra_rows"][row] = load.extra_rows
        self._write_times(row, worker_id, load)

    def _write_times(self, row: int, worker_id: str, load: WorkerLoad) -> None:
        """Write the times that follow from the worker's requests, limits and coefficients (`times.perf_model`)."""
        limits, perf = self._terms[worker_id]
        exists, queue = load.exists, load.queue
        rows: float = exists.size
        running: float = exists.sum  # the LoRA loads
        queued = queue.sum
        if load.uneven:
            rows, running = rows + load.extra_rows, running + load.extra_ranks
        if perf.kernel == "bgmv":
            running, queued = rows * exists.max, queue.size * queue.max
        base_ms = perf.decode_base_ms if perf.decode_base_ms > MIN_STEP_MS else MIN_STEP_MS
        self.table["step_ms"][row] = base_ms + perf.decode_row_ms * rows + perf.decode_lora_ms * running
        queue_ms = perf.prefill_base_ms + perf.prefill_token_ms * load.queue_tokens + perf.prefill_lora_ms * queued
        self.table["queue_ms"][row] = queue_ms
        if exists.size >= limits.max_running:
            self.crowded.add(row)
        else:
            self.crowded.discard(row)

    # ---- their adapters

    def replace_adapters(self, worker_id: str, tiers: Mapping[str, Tier]) -> None:
        """Replace the worker's adapters by these."""
        old = self._adapters[worker_id]
        if old == tiers:
            return
        self._adapters[worker_id] = new = dict(tiers)
        for digest in old.keys() | new.keys():
            if old.get(digest) != new.get(digest):
                self._locate(worker_id, digest)

    def put_adapter(self, worker_id: str, digest: str, tier: Tier) -> None:
        """Set the fastest tier of an adapter on the worker."""
        self._adapters[worker_id][digest] = tier
        self._locate(worker_id, digest)

    def drop_adapter(self, worker_id: str, digest: str) -> None:
        """Remove an adapter that the worker holds in no tier any more; unknown ones are ignored."""
        if self._adapters[worker_id].pop(digest, None) is not None:
            self._locate(worker_id, digest)

    def _locate_all(self, worker_id: str, digests: Iterable[str]) -> None:
        for digest in digests:
            self._locate(worker_id, digest)

    def _locate(self, worker_id: str, digest: str) -> None:
        row = self._row[worker_id]
        bits = place_bits(self._adapters[worker_id].get(digest), in_use=digest in self._loads[worker_id].adapters)
        if more := self._index.mark(digest, row, bits):
            self.table["adapters_loaded"][row] += more

    def _count_slots(self, row: int) -> None:
        t = self.table
        used, slots = float(t["adapters_used"][row]), float(t["adapter_slots"][row])
        if slots == inf:
            t["slots_used"][row] = t["slots_lacking"][row] = t["slots_short"][row] = 0.0
            return
        t["slots_used"][row] = used / slots
        t["slots_lacking"][row] = max(0.0, used + 1.0 - slots) / slots
        t["slots_short"][row] = max(0.0, used + 1.0 - slots + sqrt(slots)) / slots

    # ---- rows

    def _forget_derived(self) -> None:
        """Drop cached results, because a worker came or left, or its limits changed."""
        self._perf = self._least = self._travel_gain = self.found = None
        self._serving.clear()
        self._alike.clear()
        self._changes.clear()

    def _take_row(self) -> int:
        if not self._free:
            used = len(self.ids)
            more = free_rows(used)
            self.table = {name: np.concatenate([column, more[name]]) for name, column in self.table.items()}
            self.ids += [""] * used
            self._free = list(range(2 * used - 1, used - 1, -1))
        return self._free.pop()
