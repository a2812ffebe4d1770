"""Stage 7: the time of a decode step by kernel, beside the lower bound of each kind."""

from __future__ import annotations

import re
import statistics
from functools import partial
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu_stages.bed import Bed, scratch
from bench.gpu_stages.results import Line, Point
from bench.gpu_stages.serving import OUTPUT, PROMPT, Served
from bench.gpu_stages.shapes import RANKS, adapter_bytes
from bench.models import prompts
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.native.checkpoint import parameters
from motet.shared.clock import now_s
from motet.shared.model import SamplingParams

MODEL = "Llama-3.1-8B"
LOADS = [(32, 32), (256, 32), (32, 0), (8, 8)]
STEPS = 12
SHOWN = 30  # kernels
KINDS = {
    "lora": r"lora_",
    "between products": r"add_norm|rotate_and_store|silu_mul",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|mm_|linear|addmm|splitk",
    "attention": r"fmha|flash|attention|softmax|bmm|sdpa",
    "gathering": r"index|gather|scatter|copy|fill|cat|memcpy|memset",
}


class Kernels:
    """Stage 7: the time of a decode step by kernel."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._directory = scratch()
        self._served: Served | None = None

    def points(self) -> list[Point]:
        loads = self._bed.pick(LOADS, [(2, 2)])
        return [Point(f"{r} requests, {a} adapters", partial(self._profile, r, a), 150.0) for r, a in loads]

    def _profile(self, requests: int, adapters: int) -> Line:
        bed, steps = self._bed, self._bed.pick(STEPS, 2)
        if self._served is None:
            most = bed.pick(256, 4)
            ranks = [RANKS[i % len(RANKS)] for i in range(bed.pick(32, 4))]
            self._served = Served(bed, MODEL, self._directory, ranks=ranks, requests=most)
        served = self._served
        served.load(adapters)
        prompt, output = bed.pick((PROMPT, OUTPUT), (8, 12))
        served.lap(requests, adapters, prompt=prompt, output=4)
        now = now_s()
        for i, tokens in enumerate(prompts(requests, prompt, seed=1)):
            sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
            adapter = served.adapters[i % adapters] if adapters else None
            request = EngineRequest.local(f"{i}", tokens, sampling, weights=adapter, gateway_id="g", arrival_s=now)
            served.engine.add(request, now)
        while served.step().decode_rows < requests:
            pass
        plain = [_timed_ms(served) for _ in range(steps)]
        activities = [ProfilerActivity.CPU] if bed.dry else [ProfilerActivity.CUDA]
        with profile(activities=activities) as seen:
            contexts = [served.step().context_tokens for _ in range(steps)]
            bed.synchronize()
        while served.engine.has_work():
            served.step()
        return self._line(seen, requests, adapters, steps, statistics.median(plain), contexts[steps // 2])

    def _line(self, seen: Any, requests: int, adapters: int, steps: int, step_ms: float, contexts: int) -> Line:
        """Microseconds of a step."""
        wanted = DeviceType.CPU if self._bed.dry else DeviceType.CUDA
        kernels = []
        for one in seen.key_averages():
            took_us = one.self_cpu_time_total if self._bed.dry else one.self_device_time_total
            if one.device_type == wanted and took_us:
                kernels.append((took_us / steps, one.count / steps, one.key))
        kernels.sort(reverse=True)
        kinds = dict.fromkeys((*KINDS, "rest"), 0.0)
        for took_us, _, name in kernels:
            kinds[_kind(name)] += took_us
        total_us = sum(kinds.values()) or 1.0
        table = [{"us": round(us, 1), "times": n, "kernel": name[:120]} for us, n, name in kernels[:SHOWN]]
        line: Line = {"requests": requests, "adapters": adapters, "step_ms": step_ms, "kernels_us": total_us}
        line |= {"busy_fraction": total_us / 1e3 / step_ms, "kinds_us": kinds, "floors_us": self._floors(adapters, contexts)}
        line |= {"lora_share": kinds["lora"] / total_us, "attention_share": kinds["attention"] / total_us}
        return line | {"kernels": table}

    def _floors(self, adapters: int, contexts: int) -> Line:
        assert self._served is not None, "it has served"
        config, read_gb_s = self._served.config, self._bed.read_gb_s
        ranks = [RANKS[i % len(RANKS)] for i in range(adapters)]
        lora = config.num_layers * adapter_bytes(config.projection_shapes(), ranks, 2)
        kv = 4 * config.num_layers * config.num_kv_heads * config.head_dim * contexts
        embedding = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
        products = 2 * (parameters(config) - embedding)
        return {name: n / read_gb_s / 1e3 for name, n in (("lora", lora), ("attention", kv), ("products", products))}


def _timed_ms(served: Served) -> float:
    began_s = now_s()
    served.step()
    return 1e3 * (now_s() - began_s)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "rest")
