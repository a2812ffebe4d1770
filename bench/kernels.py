"""Every matrix product and LoRA shape of two models, as a fraction of this machine's limits, measured in the same run.

    M   hidden 1536, 16 layers, 12 heads, 4 KV heads, MLP 4096, vocabulary 8192
    S   hidden 512, 8 layers, 8 heads, 4 KV heads, MLP 1408, vocabulary 4096

bfloat16 throughout. A product's limit is the slower of reading its weights and multiplying them, at the bandwidth and the peak
that two probes reach. As in a step, weights come from memory and not from the caches: there are more matrices of a shape than
fit in the caches, and they are read in turn. LoRA is 32 adapters of ranks 8, 16, 32, 64 in turn on q, k, v, o, one row each,
again in more sets than fit in the caches. As in a step, it is planned once for all layers, and A x is followed by s B of the
same layer; its limit is reading every page once. A x and s B alone waste bandwidth: a page has both, and the processor fetches
ahead into the other. Attention over long contexts is in `bench.kernels_attention`.

Both limits change while others use the machine, so a probe of them follows every call, and a fraction is the median of theirs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import kernels_attention, report, roofline
from bench.watch import Watch
from motet.kernels import GROUPS, LoraPool, PackedLora
from motet.kernels.cpu import CpuEngine, Packer
from motet.kernels.memory import lazy_zeros

SHAPES = {  # model: layers, {product: (in, out)}, {module: (in, out)}
    "M": (
        16,
        {"qkv": (1536, 2560), "o": (1536, 1536), "gate_up": (1536, 8192), "down": (4096, 1536), "lm_head": (1536, 8192)},
        {"q_proj": (1536, 1536), "k_proj": (1536, 512), "v_proj": (1536, 512), "o_proj": (1536, 1536)},
    ),
    "S": (
        8,
        {"qkv": (512, 1024), "o": (512, 512), "gate_up": (512, 2816), "down": (1408, 512), "lm_head": (512, 4096)},
        {"q_proj": (512, 512), "k_proj": (512, 256), "v_proj": (512, 256), "o_proj": (512, 512)},
    ),
}
MLP = {"M": 4096, "S": 1408}
RANKS = (8, 16, 32, 64)
ADAPTERS = 32
ROWS = (1, 8, 32, 256)
BATCH = 32  # rows of the figure
COLD_BYTES = 1 << 30  # weights of one kind: more than the last-level cache of any server, so that nothing is found there
QUICK_BYTES = 1 << 24  # may be found there: a quick run says little
STEP = "A x and s B"
DTYPE = torch.bfloat16


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--only", choices=["attention", "products"], help="measure only this part")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, return the figures."""
    repeats, watch = 1 if args.quick else 7, args.watch
    engine = CpuEngine()
    torch.manual_seed(0)
    cold_bytes = QUICK_BYTES if args.quick else COLD_BYTES
    limits = _Limits(engine, cold_bytes)
    found: dict[str, Any] = {"isa": engine.isa, "threads": engine.threads}
    if args.only != "products":
        attention = kernels_attention.measure(
            engine, lambda: limits.probe().bytes_per_s, cold_bytes, repeats, watch, quick=args.quick
        )
        print(kernels_attention.table(attention))
        found |= kernels_attention.figures(attention)
    if args.only == "attention":
        return found | {"bandwidth_gb_per_s": round(limits.bandwidth / 1e9, 1)}
    products: list[list[object]] = []
    gemm_fractions, lora_fractions = [], []
    adapters: list[list[object]] = []
    for model, (layers, shapes, modules) in list(SHAPES.items())[-1 if args.quick else 0 :]:
        for name, (fan_in, fan_out) in shapes.items():
            for rows, (gbps, gflops, fraction) in _product(engine, limits, fan_in, fan_out, repeats, watch).items():
                products.append([f"{model} {name} {fan_in}x{fan_out}", rows, gbps, gflops, fraction])
                if rows == BATCH:
                    gemm_fractions.append(fraction)
        if args.only == "products":
            continue
        of_lora = _lora(engine, limits, layers, modules, MLP[model], repeats, watch)
        adapters += [[f"{model} {name}", gbps, fraction] for name, (gbps, fraction) in of_lora.items()]
        lora_fractions.append(of_lora[STEP][1])
    print(f"{engine.isa}, {engine.threads} threads: {limits.bandwidth / 1e9:.1f} GB/s, {limits.peak / 1e9:.0f} GFLOP/s bf16")
    print(report.table("Packed products", ["weights", "rows", "GB/s", "GFLOP/s", "of the limit"], products))
    if adapters:
        print(report.table("LoRA, 32 adapters, one row each", ["part", "GB/s", "of the bandwidth"], adapters))
        found["lora_decode_bandwidth_fraction"] = round(statistics.fmean(lora_fractions), 3)
    return found | {
        "gemm_b32_peak_fraction": round(statistics.fmean(gemm_fractions), 3),
        "bandwidth_gb_per_s": round(limits.bandwidth / 1e9, 1),
        "peak_bf16_gflop_per_s": round(limits.peak / 1e9),
    }


class _Limits:
    """The rates of reading and multiplying, which are probed beside every measurement."""

    def __init__(self, engine: CpuEngine, cold_bytes: int) -> None:
        self._engine, self.cold_bytes = engine, cold_bytes
        self._memory = lazy_zeros([cold_bytes], dtype=torch.uint8)
        self._memory.fill_(1)
        self._probed: list[roofline.Limits] = []
        for _ in range(3):
            self.probe()

    def probe(self) -> roofline.Limits:
        """Measure both at present."""
        self._probed.append(roofline.Limits(self._engine.read_bandwidth(self._memory), self._engine.peak_flops(DTYPE)))
        return self._probed[-1]

    @property
    def bandwidth(self) -> float:
        """The median bandwidth of all probes."""
        return statistics.median(rates.bytes_per_s for rates in self._probed)

    @property
    def peak(self) -> float:
        """The highest peak of all probes."""
        return max(rates.flops_per_s for rates in self._probed)


def _product(
    engine: CpuEngine, limits: _Limits, fan_in: int, fan_out: int, repeats: int, watch: Watch
) -> dict[int, tuple[float, float, float]]:
    """{rows: (GB/s, GFLOP/s, fraction of the limit)} of one shape, over copies of its weights."""
    nbytes = fan_in * fan_out * DTYPE.itemsize
    copies = limits.cold_bytes // nbytes
    pack = Packer(engine)
    weight = torch.randn(fan_out, fan_in).to(DTYPE)
    packed = [pack(weight) for _ in range(copies)]
    found = {}
    for rows in ROWS:
        x, y = torch.randn(rows, fan_in), lazy_zeros([rows, fan_out + 16], dtype=torch.float32)[:, :fan_out]
        some = packed[: max(1, copies // 4)] if rows > BATCH else packed  # reading them takes the smaller part of the time
        pairs = _beside(limits, lambda x=x, y=y, some=some: engine.gemm(some, x, y, DTYPE), repeats, watch)  # type: ignore[misc]
        flops = 2 * rows * fan_in * fan_out
        seconds = statistics.median(s for s, _ in pairs) / len(some)
        fraction = statistics.median(max(nbytes / at.bytes_per_s, flops / at.flops_per_s) / s * len(some) for s, at in pairs)
        found[rows] = (nbytes / seconds / 1e9, flops / seconds / 1e9, fraction)
    return found


def _lora(
    engine: CpuEngine, limits: _Limits, layers: int, modules: dict[str, tuple[int, int]], mlp: int, repeats: int, watch: Watch
) -> dict[str, tuple[float, float]]:
    """{part: (GB/s, fraction of the bandwidth)} over all layers of q, k, v, o."""
    hidden = modules["q_proj"][0]
    shapes = modules | {"gate_proj": (hidden, mlp), "up_proj": (hidden, mlp), "down_proj": (mlp, hidden)}
    ranks = sum(RANKS[i % len(RANKS)] for i in range(ADAPTERS))
    per_set = ranks * sum(fan_in + fan_out for fan_in, fan_out in modules.values()) * layers * DTYPE.itemsize
    sets = max(1, limits.cold_bytes // per_set)
    pool = LoraPool(
        shapes, layers=layers, slots=sets * ADAPTERS, max_rank=max(RANKS), bytes_total=sets * per_set + (1 << 20), dtype=DTYPE
    )
    matrices = {
        m: (torch.randn(max(RANKS), i).to(DTYPE), torch.randn(o, max(RANKS)).to(DTYPE)) for m, (i, o) in modules.items()
    }
    for slot in range(sets * ADAPTERS):
        rank = RANKS[slot % len(RANKS)]
        adapter = {(layer, m): (1.0, a[:rank], b[:, :rank]) for layer in range(layers) for m, (a, b) in matrices.items()}
        pool.load(slot, PackedLora.pack(adapter, shapes, layers=layers))
    slots = [torch.arange(i * ADAPTERS, (i + 1) * ADAPTERS, dtype=torch.int32) for i in range(sets)]
    groups = [GROUPS[name] for name in ("qkv", "o")]
    x, y = torch.randn(ADAPTERS, hidden), torch.zeros(ADAPTERS, max(sum(modules[m][1] for m in group) for group in groups))
    found = {}
    for which, part in ((3, STEP), (1, "A x"), (2, "s B")):
        read = sum(fan_in * (which & 1) + fan_out * (which >> 1) for fan_in, fan_out in modules.values())
        nbytes = sets * ranks * layers * DTYPE.itemsize * read

        def once(which: int = which) -> None:
            for chosen in slots:
                engine.lora(y, x, pool, 0, 0, chosen, layers=layers, groups=len(groups), which=which)

        pairs = _beside(limits, once, repeats, watch)
        rates = [nbytes / s for s, _ in pairs]
        found[part] = (
            statistics.median(rates) / 1e9,
            statistics.median(r / at.bytes_per_s for r, (_, at) in zip(rates, pairs, strict=True)),
        )
    return found


def _beside(limits: _Limits, call: Callable[[], None], repeats: int, watch: Watch) -> list[tuple[float, roofline.Limits]]:
    """(seconds of a call, both rates just afterwards), `repeats` times."""
    call()
    pairs = []
    for _ in watch.rounds(repeats, within=0.9):
        began = time.perf_counter()
        call()
        pairs.append((time.perf_counter() - began, limits.probe()))
    return pairs
