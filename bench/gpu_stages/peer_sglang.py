"""SGLang's LoRA kernels, csgmv (its default) and triton_v2, with the buffers of its memory pool and its batches.

The projections of a fused product, `slices` of it, share tensors that are padded to the largest rank of all:

    A [slots, slices * max rank, in]    the slices of an adapter of rank r are its rows [s * r, (s + 1) * r)
    B [slots, sum of out, max rank]     its first r columns
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.gpu_stages.layers import Apply, Base, another_stream, matrices
from bench.gpu_stages.peer_files import Phase
from motet.kernels import GROUPS, LoraPool

CHUNK = 16  # its default, and its smallest
MANY_ROWS = 64  # from here on its largest chunk, 128, makes a difference
FIRST = next(iter(GROUPS))
Buffers = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Sglang:
    """The adapters of a pool in SGLang's buffers, and the rows' segments, which are prepared outside of the graph.

    `ranks`: of the adapters in slots 0, 1, ...; `row_slot` int32 [rows].
    """

    def __init__(self, files: SimpleNamespace, pool: LoraPool, ranks: Sequence[int], row_slot: np.ndarray) -> None:
        self._files, self._rank, self._device = files, max(ranks), pool.arena.device
        self._buffers = [self._fill(pool, layer, ranks) for layer in range(pool.layers)]
        outs = {group: [pool.shapes[module][1] for module in modules] for group, modules in GROUPS.items()}
        self._widest = {group: max(some) for group, some in outs.items()}
        self._offsets = {group: tuple(accumulate(some, initial=0)) for group, some in outs.items()}
        self._tensors = {
            group: (torch.tensor(some, dtype=torch.int32, device=self._device), torch.tensor(some))
            for group, some in self._offsets.items()
        }
        self._row_slot = row_slot
        self._ranks = torch.tensor(ranks, dtype=torch.int32, device=self._device)
        self._scales = torch.ones(len(ranks), device=self._device)

    def ways(self) -> dict[str, Apply]:
        """`sglang` is csgmv as it is by default, `sglang_tuned` with the tiles that it has tuned for the nearest shape.

        `sglang_chunks` has the largest `max_lora_chunk_size`, `sglang_v2` is triton_v2, which needs a GPU.
        """
        shrink, expand = self._nearest("shrink"), self._nearest("expand")
        default = self._files.tuning.get_lora_shrink_config, self._files.tuning.get_lora_expand_config
        tuned = partial(_tuned, shrink), partial(_tuned, expand)
        small, rows = self._segments(CHUNK), len(self._row_slot)
        found: dict[str, Apply] = {
            "sglang": partial(self._csgmv, small, default),
            "sglang_tuned": partial(self._csgmv, small, tuned),
        }
        if rows >= MANY_ROWS:
            found["sglang_chunks"] = partial(self._csgmv, self._segments(128 if rows >= 256 else 32), tuned)
        if self._device.type == "cuda":
            found["sglang_v2"] = self.v2()
        return found

    def v2(self) -> Apply:
        """triton_v2: tiles, split of K and overlap as its table for this architecture has them."""
        plans = PeerPlans(self._files.plan)
        found = {
            group: plans.find(len(self._row_slot), self._rank, a.shape[2], b.shape[1])
            for group, (a, b) in self._buffers[0].items()
        }
        self._files.runner.load_plans = lambda architecture: None  # checks the table with a package that may be missing
        workspace = _shared_workspace(self._files.workspace.LoraWorkspace)
        runner = self._files.runner.DenseLoraRunner(
            workspace, max_loras=len(self._ranks), device=self._device, architecture="sm90"
        )
        runner.begin_batch(
            token_slots=torch.from_numpy(self._row_slot).to(self._device),
            lora_ranks=self._ranks,
            scalings=self._scales,
            num_tokens=len(self._row_slot),
            phase=Phase.DECODE,
            graph_mode=True,
        )

        def apply(layer: int, group: str, x: torch.Tensor, base: Base) -> torch.Tensor:
            if layer == 0 and group == FIRST:
                runner.reset_routes()  # rows are sorted by adapter once in a step, within the graph
            a, b = self._buffers[layer][group]
            y: torch.Tensor = runner.apply(x, base, found[group], a=a, b=b, offsets=self._offsets[group])
            return y

        return apply

    def _fill(self, pool: LoraPool, layer: int, ranks: Sequence[int]) -> Buffers:
        found: Buffers = {}
        for group, modules in GROUPS.items():
            fan_in, outs = pool.shapes[modules[0]][0], [pool.shapes[module][1] for module in modules]
            a = pool.arena.new_zeros((len(ranks), len(modules) * self._rank, fan_in))
            b = pool.arena.new_zeros((len(ranks), sum(outs), self._rank))
            for slot, rank in enumerate(ranks):
                column = 0
                for i, module in enumerate(modules):
                    one_a, one_b = matrices(pool, slot, layer, module)
                    a[slot, i * rank : (i + 1) * rank] = one_a
                    b[slot, column : column + outs[i], :rank] = one_b
                    column += outs[i]
            found[group] = a, b
        return found

    def _segments(self, chunk: int) -> SimpleNamespace:
        """`prepare_lora_batch`: rows sorted by adapter and cut into chunks, in buffers for as many segments as rows."""
        order = np.argsort(self._row_slot, kind="stable")
        slots, counts = np.unique(self._row_slot, return_counts=True)
        pieces = [(slot, min(chunk, n - at)) for slot, n in zip(slots, counts, strict=True) for at in range(0, n, chunk)]
        indices, ends = (np.zeros(len(order) + more, dtype=np.int32) for more in (0, 1))
        indices[: len(pieces)] = [slot for slot, _ in pieces]
        ends[1 : len(pieces) + 1] = np.cumsum([size for _, size in pieces])
        ends[len(pieces) + 1 :] = len(order)
        return SimpleNamespace(
            max_len=chunk,
            num_segments=len(pieces),
            use_cuda_graph=True,
            seg_indptr=torch.from_numpy(ends).to(self._device),
            weight_indices=torch.from_numpy(indices).to(self._device),
            permutation=torch.from_numpy(order.astype(np.int32)).to(self._device),
            lora_ranks=self._ranks,
            scalings=self._scales,
        )

    def _csgmv(
        self, batch: SimpleNamespace, configured: tuple[Any, Any], layer: int, group: str, x: torch.Tensor, base: Base
    ) -> torch.Tensor:
        y = base()
        (a, b), (offsets, on_host) = self._buffers[layer][group], self._tensors[group]
        self._files.shrink.get_lora_shrink_config, self._files.expand.get_lora_expand_config = configured
        h = self._files.shrink.chunked_sgmv_lora_shrink_forward(x, a, batch, len(GROUPS[group]))
        self._files.expand.chunked_sgmv_lora_expand_forward(
            h, b, batch, offsets, self._widest[group], y, slice_offsets_cpu=on_host
        )
        return y

    def _nearest(self, kernel: str) -> dict[tuple[int, int], dict[str, Any]]:
        """{(width, slices): its tuned tiles by chunk}: those for an H200 and the nearest width with as many slices."""
        tables: dict[tuple[int, int], dict[str, Any]] = {}
        for path in Path(self._files.shrink.__file__).parent.glob(f"csgmv_configs/*/lora_{kernel},*NVIDIA_H200.json"):
            width, slices = (int(re.findall(rf"{key}=(\d+)", path.name)[0]) for key in "KS")
            tables[width, slices] = json.loads(path.read_text())
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for group, (a, b) in self._buffers[0].items():
            width, slices = a.shape[2] if kernel == "shrink" else b.shape[1], len(GROUPS[group])
            near = min((key for key in tables if key[1] == slices), key=lambda key: abs(key[0] - width))
            found[width, slices] = tables[near]
        return found


class PeerPlans:
    """triton_v2's table of plans for sm_90."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self._rows = json.loads((Path(plan.__file__).parent / "configs/sm90.plans.json").read_text())["rows"]

    def find(self, rows: int, rank: int, fan_in: int, fan_out: int) -> Any:
        """The first plan that fits a decode step of `rows` on a linear layer."""
        sizes = {"tokens": rows, "rank": rank, "in_features": fan_in, "out_features": fan_out}
        row = next(row for row in self._rows if _fits(row, sizes))
        spec = dict(row["spec"])
        kinds = {"a_family": self._plan.AFamily, "b_family": self._plan.BFamily, "overlap": self._plan.Overlap}
        return self._plan.DensePlan(**spec | {key: kind(spec[key]) for key, kind in kinds.items() if key in spec})


def _fits(row: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
    if row.get("phase") not in (None, "decode") or "linear" not in (row.get("kinds") or ["linear"]):
        return False
    most = all(size <= row.get(f"max_{name}", size) for name, size in sizes.items())
    return most and all(size >= row.get(f"min_{name}", size) for name, size in sizes.items())


def _tuned(tables: Mapping[tuple[int, int], dict[str, Any]], *, K: int, num_slices: int, chunk_size: int, **_: int) -> Any:
    return tables[K, num_slices][str(chunk_size)]


def _shared_workspace(kind: Any) -> Any:
    """A workspace of one set of buffers for all streams: they are allocated on one stream and captured on another."""

    class Shared(kind):
        _side: torch.cuda.Stream | None = None

        @staticmethod
        def _caller(device: torch.device) -> int:
            return 0

        def side_stream(self, device: torch.device) -> torch.cuda.Stream:
            self._side = another_stream(self._side)
            return self._side

    return Shared()
