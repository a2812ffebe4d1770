"""A small random decoder on the compiled kernels, twice: with adapters on the device, and with adapters being copied."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from motet.kernels import GROUPS, KvCache, LoraPool, PackedLora
from motet.kernels.cpu import CpuEngine, CpuForward, Packer
from motet.kernels.cpu.assist import Channel

MODULES = tuple(module for group in GROUPS.values() for module in group)
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 4, 64, 4, 2, 16, 96, 61
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
SHAPES = dict(
    zip(
        MODULES,
        [(HIDDEN, Q), (HIDDEN, KV), (HIDDEN, KV), (Q, HIDDEN), (HIDDEN, MLP), (HIDDEN, MLP), (MLP, HIDDEN)],
        strict=True,
    )
)
BLOCK_SIZE, BLOCKS = 8, 64
ADAPTERS: list[dict[str, int]] = [  # {module: rank}
    dict.fromkeys(MODULES, 8),
    {"q_proj": 16, "v_proj": 3},
    dict.fromkeys(MODULES, 40),
    {"down_proj": 12, "gate_proj": 24},
    {"o_proj": 8, "k_proj": 64},
]


class HostAdapter:
    """An adapter in memory that other processes can map. Its file closes with this object."""

    def __init__(self, ranks: dict[str, int], seed: int, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(seed)
        pairs = {
            (layer, module): (
                0.5 + 0.1 * layer,
                (torch.randn(rank, SHAPES[module][0], generator=draw) * 0.1).to(dtype),
                (torch.randn(SHAPES[module][1], rank, generator=draw) * 0.1).to(dtype),
            )
            for module, rank in ranks.items()
            for layer in range(LAYERS)
            if (layer, module) != (1, "v_proj")  # a layer without
        }
        packed = PackedLora.pack(pairs, SHAPES, layers=LAYERS)
        self.data_start = 64
        self.fd = os.memfd_create("adapter", os.MFD_CLOEXEC)
        os.write(self.fd, bytes(self.data_start))
        with open(self.fd, "ab", closefd=False) as file:
            file.write(packed.arena.view(torch.uint8).numpy().data)
        self.memory = mmap.mmap(self.fd, 0, access=mmap.ACCESS_COPY)
        arena = torch.frombuffer(self.memory, dtype=dtype, offset=self.data_start)
        self.packed = PackedLora(arena, packed.table, packed.pages, packed.scales, packed.shapes, packed.layers, packed.counts)

    def __del__(self) -> None:
        os.close(self.fd)


def random_weights(engine: CpuEngine, dtype: torch.dtype) -> SimpleNamespace:
    draw = torch.Generator().manual_seed(0)
    pack = Packer(engine)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=draw) * 0.15).to(dtype)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(HIDDEN, generator=draw)

    layers = [
        SimpleNamespace(
            input_norm=norm(),
            qkv=pack(matrix(Q + 2 * KV, HIDDEN)),
            qk_norm=None,
            o=pack(matrix(HIDDEN, Q)),
            post_norm=norm(),
            gate_up=pack(matrix(2 * MLP, HIDDEN)),
            down=pack(matrix(HIDDEN, MLP)),
        )
        for _ in range(LAYERS)
    ]
    return SimpleNamespace(embed=matrix(VOCAB, HIDDEN) * 4, norm=norm(), lm_head=pack(matrix(VOCAB, HIDDEN)), layers=layers)


def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None].float() * (100.0 ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    return angles.cos(), angles.sin()


class Decoder:
    """The decoder with its own cache and pool. Adapter i belongs in slot i + 1."""

    def __init__(self, engine: CpuEngine, weights: SimpleNamespace, hosts: Sequence[HostAdapter], dtype: torch.dtype) -> None:
        self.hosts = {slot: host for slot, host in enumerate(hosts, 1)}
        self.pool = LoraPool(SHAPES, layers=LAYERS, slots=len(hosts) + 2, max_rank=64, bytes_total=4 << 20, dtype=dtype)
        self.pool.arena.fill_(float("nan"))
        cache = KvCache(layers=LAYERS, blocks=BLOCKS, block_size=BLOCK_SIZE, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
        self.forward = CpuForward(
            engine, weights, heads=HEADS, eps=1e-5, windows=[0] * LAYERS, rotary=rotary, cache=cache, pool=self.pool
        )
        for slot, host in self.hosts.items():
            self.pool.load(slot, host.packed)

    def have(self, slot: int, layers: int) -> None:
        """Load the first `layers` layers of the slot's adapter. The others are NaN."""
        host, pool = self.hosts[slot].packed, self.pool
        for layer in range(LAYERS):
            for m, module in enumerate(MODULES):
                width = 8 * sum(SHAPES[module])
                for page in range(int(host.pages[0, m])):
                    at, source = (
                        int(table[s, m, page]) * 8 + layer * width for table, s in ((pool.table, slot), (host.table, 0))
                    )
                    row = pool.arena[at : at + width]
                    if layer < layers:
                        row.copy_(host.arena[source : source + width])
                    else:
                        row.fill_(float("nan"))
        pool.loaded_layers[slot] = layers
        _wake(pool.loaded_layers.ctypes.data + 4 * slot)


def _wake(address: int) -> None:
    """Wake up the threads that wait for a number there to change (futex, FUTEX_WAKE_PRIVATE), as the loader does."""
    number = {"x86_64": 202, "aarch64": 98}[platform.machine()]
    ctypes.CDLL(None).syscall(number, ctypes.c_void_p(address), 129, 1 << 30, None, None, 0)


@dataclass
class Sequence_:
    """One request: its slot and how many of its tokens are written."""

    slot: int
    tokens: list[int]
    done: int = 0


def rows_of(sequences: Sequence[Sequence_], takes: Sequence[int]) -> SimpleNamespace:
    """The next `takes[i]` tokens of every sequence, logits wanted of all rows. Sequence i has blocks 8 i to 8 i + 7."""
    tokens, positions, slots, kv_slots = [], [], [], []
    for i, (sequence, take) in enumerate(zip(sequences, takes, strict=True)):
        for position in range(sequence.done, sequence.done + take):
            tokens.append(sequence.tokens[position])
            positions.append(position)
            slots.append(sequence.slot)
            kv_slots.append(i * 8 * BLOCK_SIZE + position)
    return SimpleNamespace(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        row_slot=np.array(slots, dtype=np.int32),
        seq_starts=np.cumsum([0, *takes]).astype(np.int32),
        context_lens=np.array([s.done + t for s, t in zip(sequences, takes, strict=True)], dtype=np.int32),
        block_tables=np.arange(8 * len(sequences), dtype=np.int32).reshape(len(sequences), 8),
        kv_slots=np.array(kv_slots, dtype=np.int64),
        logit_rows=np.arange(sum(takes), dtype=np.int64),
        merged=False,
    )


@contextmanager
def served(channels: Sequence[Channel]) -> Iterator[None]:
    """Each channel by a thread of this process."""
    threads = [threading.Thread(target=channel.serve) for channel in channels]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for channel, thread in zip(channels, threads, strict=True):
            channel.stop()
            thread.join()
