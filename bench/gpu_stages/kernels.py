"""Stage 7: the time of a decode step by kernel, beside the lower bound of each kind."""

from __future__ import annotations

import cProfile
import pstats
import re
import statistics
from functools import cached_property, partial
from pathlib import Path
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
LOADS = [(32, 32), (32, 0), (256, 1), (256, 32), (8, 8)]
BESIDE = 16  # requests that decode while prompts come
PROMPT_TOKENS = 90  # of the first of those prompts; each is a token longer than the one before
FUNCTIONS = 40  # shown of the host's profile
STEPS = 12
SHOWN = 30  # kernels
KINDS = {
    "lora": r"lora_",
    "draws": r"peak_tiles|measure_tiles|gather_keys|select_key|weigh_tiles|pick_token",
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

    def points(self) -> list[Point]:
        loads = self._bed.pick(LOADS, [(2, 2)])
        found = [Point(f"{r} requests, {a} adapters", partial(self._profile, r, a), 150.0) for r, a in loads]
        prompt = [Point(f"a prompt beside {BESIDE} requests", self._beside, 150.0)]
        return [*found[:2], *prompt, *found[2:]]

    @cached_property
    def _served(self) -> Served:
        bed = self._bed
        ranks = [RANKS[i % len(RANKS)] for i in range(bed.pick(32, 4))]
        return Served(bed, MODEL, self._directory, ranks=ranks, requests=bed.pick(256, BESIDE + 2))

    def _profile(self, requests: int, adapters: int) -> Line:
        bed, served, steps = self._bed, self._served, self._bed.pick(STEPS, 2)
        prompt, output = bed.pick((PROMPT, OUTPUT), (8, 12))
        self._decoding(requests, adapters, prompt, output)
        plain = [_timed_ms(served) for _ in range(steps)]
        with self._profiler() as seen:
            contexts = [served.step().context_tokens for _ in range(steps)]
            bed.synchronize()
        self._drain()
        return self._line(seen, requests, adapters, steps, statistics.median(plain), contexts[steps // 2])

    def _beside(self) -> Line:
        """Steps that compute a prompt of an adapter of its own beside requests that decode: on the device, and on the host."""
        bed, served, steps = self._bed, self._served, self._bed.pick(STEPS, 2)
        adapters = bed.pick(BESIDE, 2)
        self._decoding(BESIDE, adapters, *bed.pick((PROMPT, 4 * OUTPUT), (8, 60)))
        served.load(len(served.adapters))
        new = [self._prompt_step(i)["took_ms"] for i in range(steps)]  # each length for the first time
        plain = [self._prompt_step(i) for i in range(steps)]
        with self._profiler() as seen:
            for i in range(steps):
                self._prompt_step(i)
            bed.synchronize()
        host = cProfile.Profile()
        for i in range(steps):
            self._prompt_step(i, host)
        self._drain()
        middle = sorted(plain, key=lambda one: one["took_ms"])[steps // 2]
        line = self._line(seen, BESIDE + 1, adapters + 1, steps, middle["took_ms"], 0)
        line |= {"parts_ms": middle, "new_ms": new, "each_ms": [one["took_ms"] for one in plain]}
        line |= served.graphs
        return line | {"functions": _functions(host, steps)}

    def _prompt_step(self, number: int, host: cProfile.Profile | None = None) -> dict[str, float]:
        """Add a prompt and compute it in one step, then two steps without. Returns the milliseconds of the step's parts."""
        served, bed = self._served, self._bed
        tokens = prompts(1, bed.pick(PROMPT_TOKENS, 8) + number, seed=number)[0]
        self._add(f"p{number}", tokens, len(served.adapters) - 1 - number % bed.pick(8, 2), 2)
        bed.synchronize()
        if host is not None:
            host.enable()
        took_ms = _timed_ms(served)
        if host is not None:
            host.disable()
        parts = {part: 1e3 * s for part, s in served.engine.clock.laps.items()}
        served.step()
        served.step()
        return {"took_ms": took_ms, **parts}

    def _decoding(self, requests: int, adapters: int, prompt: int, output: int) -> None:
        """Bring this many requests to where all of them decode."""
        served = self._served
        served.load(adapters)
        served.lap(requests, adapters, prompt=prompt, output=4)
        for i, tokens in enumerate(prompts(requests, prompt, seed=1)):
            self._add(f"{i}", tokens, i % adapters if adapters else None, output)
        while served.step().decode_rows < requests:
            pass

    def _add(self, name: str, tokens: list[int], adapter: int | None, output: int) -> None:
        served, now = self._served, now_s()
        weights = None if adapter is None else served.adapters[adapter]
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        request = EngineRequest.local(name, tokens, sampling, weights=weights, gateway_id="g", arrival_s=now)
        served.engine.add(request, now)

    def _drain(self) -> None:
        while self._served.engine.has_work():
            self._served.step()

    def _profiler(self) -> Any:
        return profile(activities=[ProfilerActivity.CPU] if self._bed.dry else [ProfilerActivity.CUDA])

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


def _functions(host: cProfile.Profile, steps: int) -> list[Line]:
    """Python functions of the host by their own time, microseconds of a step. Profiling makes calls about twice as slow."""
    stats: Any = pstats.Stats(host).stats  # type: ignore[attr-defined]
    rows = [(own_s, every_s, calls, where) for where, (_, calls, own_s, every_s, _) in stats.items()]
    rows.sort(reverse=True)
    return [
        {
            "function": f"{Path(file).name}:{line} {name}",
            "calls": calls / steps,
            "own_us": round(1e6 * own_s / steps, 1),
            "all_us": round(1e6 * every_s / steps, 1),
        }
        for own_s, every_s, calls, (file, line, name) in rows[:FUNCTIONS]
    ]


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "rest")
