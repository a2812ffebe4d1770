"""What is known of every worker, kept so that a decision costs a few array operations however many workers there are.

One row of `table` per worker (structure of arrays); the sums and maxima that Algorithm 1 needs are kept up to date as
requests come and go, never recounted:

    put_request / drop_request -> _Load (per worker, plain Python) -> the worker's row -> decide() reads columns

`queued` requests are those in phase "loading" or "waiting"; `exists` = queued + running. Freed rows are reused and the
table doubles when it is full. Pure: the caller says who said what and when; what a message means is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.perf_model import Floats
from shared.model import PerfModel, RequestBrief, WorkerLimits

_PERF = (
    "prefill_base_ms", "prefill_token_ms", "prefill_lora_ms", "decode_base_ms", "decode_row_ms", "decode_lora_ms",
    "load_base_ms", "load_ms_per_mib",
)  # fmt: skip
_ROW = np.dtype(
    [
        ("base", "i8"),  # index of the base model's name; -1: a free row
        ("heard_s", "f8"),
        ("draining", "?"),
        ("refusing", "?"),  # it refused for lack of room since its last word
        ("max_model_len", "i8"),
        ("max_lora_rank", "i8"),
        ("max_requests", "i8"),  # max_running + max_waiting
        ("block_size", "i8"),
        ("kv_blocks_total", "i8"),
        ("kv_blocks_free", "i8"),
        ("running", "i8"),
        ("running_left", "i8"),  # output tokens the running requests are still expected to produce
        ("queued", "i8"),
        ("queue_tokens", "i8"),  # tokens the queued requests have to prefill
        ("queue_rank_sum", "i8"),
        ("queue_max_rank", "i8"),
        ("rank_sum", "i8"),  # over exists
        ("max_rank", "i8"),
        ("bgmv", "?"),
        *((name, "f8") for name in _PERF),
    ]
)


class PerfColumns:
    """The perf model coefficients of some workers, one array element per worker (`perf_model.Coefficients`)."""

    def __init__(self, table: NDArray[Any]) -> None:
        self.bgmv: NDArray[np.bool_] = table["bgmv"]
        self.prefill_base_ms: Floats = table["prefill_base_ms"]
        self.prefill_token_ms: Floats = table["prefill_token_ms"]
        self.prefill_lora_ms: Floats = table["prefill_lora_ms"]
        self.decode_base_ms: Floats = table["decode_base_ms"]
        self.decode_row_ms: Floats = table["decode_row_ms"]
        self.decode_lora_ms: Floats = table["decode_lora_ms"]
        self.load_base_ms: Floats = table["load_base_ms"]
        self.load_ms_per_mib: Floats = table["load_ms_per_mib"]

    def lora_load(self, rows: NDArray[Any], rank_sum: NDArray[Any], max_rank: NDArray[Any]) -> Floats:
        """Each worker's LoRA load under its own kernel; the vector form of `perf_model.lora_load`."""
        return np.where(self.bgmv, rows * max_rank, rank_sum).astype(np.float64)


class _Ranks:
    """A multiset of ranks with its size, sum and maximum."""

    __slots__ = ("counts", "max", "size", "sum")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.size = self.sum = self.max = 0

    def add(self, rank: int) -> None:
        self.counts[rank] = self.counts.get(rank, 0) + 1
        self.size += 1
        self.sum += rank
        self.max = max(self.max, rank)

    def remove(self, rank: int) -> None:
        left = self.counts[rank] - 1
        self.size -= 1
        self.sum -= rank
        if left:
            self.counts[rank] = left
        else:
            del self.counts[rank]
            if rank == self.max:
                self.max = max(self.counts, default=0)


class _Load:
    """One worker's requests and their aggregates."""

    __slots__ = ("exists", "queue", "queue_tokens", "requests", "running_left")

    def __init__(self) -> None:
        self.requests: dict[str, RequestBrief] = {}
        self.exists, self.queue = _Ranks(), _Ranks()
        self.queue_tokens = self.running_left = 0

    def add(self, brief: RequestBrief) -> None:
        self.requests[brief.request_id] = brief
        self.exists.add(brief.rank)
        if brief.phase == "running":
            self.running_left += tokens_left(brief)
        else:
            self.queue.add(brief.rank)
            self.queue_tokens += tokens_to_prefill(brief)

    def remove(self, request_id: str) -> bool:
        brief = self.requests.pop(request_id, None)
        if brief is None:
            return False
        self.exists.remove(brief.rank)
        if brief.phase == "running":
            self.running_left -= tokens_left(brief)
        else:
            self.queue.remove(brief.rank)
            self.queue_tokens -= tokens_to_prefill(brief)
        return True


def tokens_left(brief: RequestBrief) -> int:
    """Output tokens a running request is still expected to produce: at least one."""
    return max(1, brief.predicted_tokens - brief.output_tokens)


def tokens_to_prefill(brief: RequestBrief) -> int:
    """Tokens a queued request has to prefill: a resumed one recomputes what it already produced."""
    return brief.prompt_tokens + brief.output_tokens


class ClusterState:
    """All workers. `table` is read by policies, one row per worker and some free ones (`base` is -1)."""

    def __init__(self) -> None:
        self.table = _free_rows(16)
        self.ids: list[str] = [""] * len(self.table)
        self._row: dict[str, int] = {}
        self._free = list(range(len(self.table) - 1, -1, -1))
        self._loads: dict[str, _Load] = {}
        self._bases: dict[str, int] = {}

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._row

    def __len__(self) -> int:
        return len(self._row)

    def workers(self) -> list[str]:
        """Every worker's id."""
        return list(self._row)

    def base_index(self, base_model: str) -> int:
        """The value of column `base` for this model; -2, which no row has, when no worker ever served it."""
        return self._bases.get(base_model, -2)

    def row(self, worker_id: str) -> int:
        """The worker's row in `table`, -1 when it is not known."""
        return self._row.get(worker_id, -1)

    def requests(self, worker_id: str) -> Mapping[str, RequestBrief]:
        """What the worker has, by request id."""
        return self._loads[worker_id].requests

    def put_worker(self, worker_id: str, limits: WorkerLimits, perf: PerfModel) -> None:
        """Add a worker, or renew the limits and coefficients of a known one."""
        row = self._row.get(worker_id)
        if row is None:
            row = self._take_row()
            self._row[worker_id], self.ids[row] = row, worker_id
            self._loads[worker_id] = _Load()
        t = self.table
        t["base"][row] = self._bases.setdefault(limits.base_model, len(self._bases))
        t["max_model_len"][row] = limits.max_model_len
        t["max_lora_rank"][row] = limits.max_lora_rank
        t["max_requests"][row] = limits.max_running + limits.max_waiting
        t["block_size"][row] = limits.block_size
        t["kv_blocks_total"][row] = limits.kv_blocks_total
        t["bgmv"][row] = perf.kernel == "bgmv"
        for name in _PERF:
            t[name][row] = getattr(perf, name)

    def drop_worker(self, worker_id: str) -> None:
        """Forget a worker and all it had; unknown ids are ignored."""
        row = self._row.pop(worker_id, None)
        if row is None:
            return
        del self._loads[worker_id]
        self.table[row] = _free_rows(1)[0]
        self.ids[row] = ""
        self._free.append(row)

    def heard(self, worker_id: str, now_s: float, *, kv_blocks_free: int, draining: bool) -> None:
        """A worker spoke: these facts are its latest, and what was held against it is forgiven."""
        row, t = self._row[worker_id], self.table
        t["heard_s"][row] = now_s
        t["kv_blocks_free"][row] = kv_blocks_free
        t["draining"][row] = draining
        t["refusing"][row] = False

    def set_heard(self, worker_id: str, heard_s: float) -> None:
        """Change only when the worker was last heard."""
        self.table["heard_s"][self._row[worker_id]] = heard_s

    def set_refusing(self, worker_id: str) -> None:
        """Out of room by its own word, until it is heard again."""
        self.table["refusing"][self._row[worker_id]] = True

    def set_draining(self, worker_id: str) -> None:
        """Takes nothing new by its own word, until it is heard again."""
        self.table["draining"][self._row[worker_id]] = True

    def replace_requests(self, worker_id: str, briefs: Iterable[RequestBrief]) -> None:
        """These are all the requests the worker has."""
        load = _Load()
        for brief in briefs:
            load.remove(brief.request_id)  # a snapshot that names one twice must not count it twice
            load.add(brief)
        self._loads[worker_id] = load
        self._write(worker_id, load)

    def put_request(self, worker_id: str, brief: RequestBrief) -> None:
        """The worker has this request, new or changed."""
        load = self._loads[worker_id]
        load.remove(brief.request_id)
        load.add(brief)
        self._write(worker_id, load)

    def drop_request(self, worker_id: str, request_id: str) -> None:
        """The worker does not have this request any more; unknown ids are ignored."""
        load = self._loads[worker_id]
        if load.remove(request_id):
            self._write(worker_id, load)

    def _write(self, worker_id: str, load: _Load) -> None:
        row, t = self._row[worker_id], self.table
        t["running"][row] = load.exists.size - load.queue.size
        t["running_left"][row] = load.running_left
        t["queued"][row] = load.queue.size
        t["queue_tokens"][row] = load.queue_tokens
        t["queue_rank_sum"][row] = load.queue.sum
        t["queue_max_rank"][row] = load.queue.max
        t["rank_sum"][row] = load.exists.sum
        t["max_rank"][row] = load.exists.max

    def _take_row(self) -> int:
        if not self._free:
            used = len(self.table)
            self.table = np.concatenate([self.table, _free_rows(used)])
            self.ids += [""] * used
            self._free = list(range(2 * used - 1, used - 1, -1))
        return self._free.pop()


def _free_rows(count: int) -> NDArray[Any]:
    rows = np.zeros(count, dtype=_ROW)
    rows["base"] = -1
    return rows
