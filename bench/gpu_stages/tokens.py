"""Stage 2, second half: the tokens of the whole engine on the device equal those of transformers and PEFT.

The demo model in fp32 with its adapters, all in one batch: with graphs and without, preempted, resumed, while adapters are
added and removed, while they are being copied, and while the boundary between KV blocks and adapters moves. In bf16 its logits
are as near to fp32's as those of transformers in bf16.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
import torch

from bench.gpu_stages.bed import Bed
from bench.gpu_stages.results import Line, Point
from bench.stored_adapters import stored_adapter
from motet.examples.demo import DEMO
from motet.kernels.library_attention import LibraryAttention
from motet.kernels.triton.attention import PagedAttention
from motet.policies.step.cold_start import ColdStartName
from motet.policies.step.merge_decision import MergeCosts, Merging
from motet.policies.step.merged_copy import MERGE
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.request import EngineLimits, EngineRequest, StepOutput
from motet.services.worker.native.backend import BackendOptions
from motet.services.worker.native.backends import open_backend
from motet.services.worker.native.decode_graphs import DecodeGraphs
from motet.services.worker.native.engine import Engine
from motet.services.worker.native.merged_model import MergedModel
from motet.services.worker.native.prompt_graphs import PromptGraphs
from motet.services.worker.native.runner import ModelRunner
from motet.services.worker.native.step_batch import StepBatch
from motet.shared.clock import now_s
from motet.shared.model import SamplingParams
from motet.shared.worker_options import WorkerOptions

BLOCK = 8
TIE = 1e-3  # two logits as near as this may change places between two ways of computing them
LINK = 5e6  # bytes per second: adapters of some 100 KB are on their way for many steps
PROCESS_S = 30.0  # for CPU LoRA processes to start
MERGED_REQUESTS, MERGED_ROUNDS = 6, 12
MERGING_PAYS = MergeCosts(switch_ms=0.0, step_ms=1.0, row_ms=0.0, lora=1.0)
"""With measured times, merging depends on noise in a model as small as the demo's."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, and the answer of transformers and PEFT. `margins`: the lead of each of its tokens over the second best."""

    prompt: list[int]
    adapter: str | None
    tokens: list[int]
    margins: list[float]


class Tokens:
    """The last points of stage 2: the tokens of the engine compared with those of transformers and PEFT."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        names = sorted(path.name for path in (DEMO / "adapters").iterdir() if (path / "adapter_config.json").exists())
        self._names = names[: bed.pick(len(names), 3)]
        self._count = bed.pick(24, 10)

    def points(self) -> list[Point]:
        kinds: dict[str, dict[str, Any]] = {
            "graphs": {"prompts": True},
            "no graphs": {"graphs": False},
            "preempted": {"kv_blocks": self._bed.pick(60, 10)},
            "adapters come and go": {"max_loras": 3, "small": True},
            "shared memory": {"kv_blocks": self._bed.pick(60, 10), "small": True, "elastic": True},
            "continued": {"resume": True},
            "layer-wise": {"cold": "layerwise"},
            "assisted": {"cold": "assist", "assist": True},
        }
        found = [Point(f"tokens, {name}", partial(self._compare, **options), 150.0) for name, options in kinds.items()]
        found[2:2] = [Point("logits in bf16", self._logits, 150.0)]
        found.append(Point("tokens, merged", self._merged, 150.0))
        return found

    @cached_property
    def _oracle(self) -> _Oracle:
        return _Oracle(self._names, torch.float32, self._bed.device)

    @cached_property
    def _wanted(self) -> list[Wanted]:
        draw = random.Random(0)
        found = []
        for adapter in [None, *self._names, None]:
            prompt = [draw.randrange(3, 288) for _ in range(draw.randint(4, 40))]
            found.append(Wanted(prompt, adapter, *self._oracle.greedy(prompt, self._count, adapter)))
        return found

    def _compare(
        self,
        *,
        graphs: bool = True,
        prompts: bool = False,
        kv_blocks: int = 400,
        max_loras: int = 20,
        small: bool = False,
        resume: bool = False,
        cold: ColdStartName = "blocking",
        assist: bool = False,
        elastic: bool = False,
    ) -> Line:
        wanted = self._wanted
        lora_bytes = self._bed.pick(4 << 20, 1 << 20) if small else 32 << 20  # room for the largest, and for two others
        options = {"link": cold != "blocking", "assist": assist, "graphs": graphs, "elastic": elastic}
        runner = _runner(self._bed, kv_blocks, lora_bytes, max_loras, **options)
        recorded = _graphs(self._bed, runner, prompts=prompts) if graphs else None
        if prompts and not self._bed.dry:
            runner.prepare()  # as a worker does; the other points have graphs that are captured in between
        blocks = _Divisions(runner).blocks
        limits = EngineLimits(max_running=64, block_size=BLOCK, kv_blocks=kv_blocks)
        decides = WorkerOptions(max_step_tokens=256, max_loras=max_loras, prefix_cache=True)
        engine = Engine(runner, limits, msgspec.structs.replace(decides, cold_start=cold))
        try:
            adapters = {name: _host(name, runner) for name in self._names}
            if assist:
                _wait_for_processes(runner)
            outputs, preempted, modes = _serve(engine, wanted, adapters, resume=resume)
            rows = runner.assisted
        finally:
            engine.close()
        different, ties = _differences(wanted, outputs)
        line: Line = {"requests": len(wanted), "tokens": sum(map(len, outputs)), "different": different, "near_ties": ties}
        line |= {"graphs": len(recorded.captured) if recorded is not None else 0, "preempted": preempted, "cold_starts": modes}
        line["prompt_graphs"] = _prompt_graphs(runner)
        line |= {"by_processes": rows.by_processes, "repaired": rows.repaired, "divisions": len(blocks)}
        met = (
            (not graphs or cold != "blocking" or line["graphs"])
            and (not prompts or line["prompt_graphs"] or isinstance(runner.memory.cache.library, LibraryAttention))
            and (len(blocks) > 1 if elastic else kv_blocks == 400 or preempted)
            and (not assist or rows.by_processes)
        )
        return line | {"good": bool(met and not different)}

    def _merged(self) -> Line:
        """Requests of one adapter while it is merged into a copy of the weights, and after it has been."""
        adapter = self._names[0]
        draw = random.Random(1)
        wanted = []
        for _ in range(MERGED_REQUESTS):
            prompt = [draw.randrange(3, 288) for _ in range(draw.randint(4, 40))]
            wanted.append(Wanted(prompt, adapter, *self._oracle.greedy(prompt, self._count, adapter)))
        runner = _runner(self._bed, 2000, 32 << 20, 20, elastic=True, merge=True)
        recorded = _graphs(self._bed, runner)
        assert isinstance(runner.merged, MergedModel), "the torch model merges"
        runner.merged.dropped = recorded.forget_merged
        limits = EngineLimits(max_running=64, block_size=BLOCK, kv_blocks=2000)
        decides = WorkerOptions(max_step_tokens=256, max_loras=20, merge="on", prefix_cache=False)
        engine = Engine(runner, limits, decides, merging=dataclasses.replace(MERGE, decrement=0.0, multiply=1.0))
        copy, modes = engine.core.copy, engine.core.modes
        assert copy is not None and isinstance(modes, Merging), "it merges"
        modes.costs, copy.weigh = MERGING_PAYS, lambda running: None  # type: ignore[method-assign]
        weights = {adapter: _host(adapter, runner)}
        steps: list[bool] = []
        step = engine.step

        def noted(now_s: float) -> StepOutput:
            output = step(now_s)
            steps.append(output.stats.merging is not None and bool(output.stats.merging.merged))
            return output

        engine.step = noted  # type: ignore[method-assign]
        try:
            rounds = [_serve(engine, wanted, weights, resume=False)[0] for _ in range(MERGED_ROUNDS)]
        finally:
            engine.close()
        found = [_differences(wanted, outputs) for outputs in rounds]
        different = [text for texts, _ in found for text in texts]
        line: Line = {"requests": len(wanted) * len(rounds), "steps": len(steps), "merged_steps": sum(steps)}
        line |= {"different": different, "near_ties": sum(ties for _, ties in found)}
        line["graphs"] = sum(key[2] for key in recorded.captured)
        return line | {"good": bool(0 < sum(steps) < len(steps) and line["graphs"] and not different)}

    def _logits(self) -> Line:
        """Relative error of all logits of prompts and of decode steps, in CUDA graphs on a GPU, compared with fp32."""
        bed, wanted = self._bed, self._wanted
        theirs = _Oracle(self._names, torch.bfloat16, bed.device)
        runner = _runner(bed, 400, 32 << 20, 20, dtype="bfloat16")
        _graphs(bed, runner)
        slots = {name: slot for slot, name in enumerate(self._names)}
        for name, slot in slots.items():
            runner.load_adapter(slot, _host(name, runner))
        ours, peers = [_Error(), _Error()], [_Error(), _Error()]  # of prompts, of decode steps
        for one in wanted:
            tokens, start = one.prompt + one.tokens, len(one.prompt)
            sure, peer = (oracle.logits(tokens, one.adapter) for oracle in (self._oracle, theirs))
            slot = -1 if one.adapter is None else slots[one.adapter]
            for first, last in ((0, start), *((at, at + 1) for at in range(start, len(tokens)))):
                part = slice(first, last)
                ours[first > 0].add(runner.forward(_rows(tokens, first, last, slot)).cpu(), sure[part])
                peers[first > 0].add(peer[part], sure[part])
        runner.close()
        line: Line = {"error_prompt": ours[0].value, "error_decode": ours[1].value}
        line |= {"transformers_prompt": peers[0].value, "transformers_decode": peers[1].value}
        line["prompt_graphs"] = _prompt_graphs(runner)
        return line | {"good": all(one.value <= 1.2 * peer.value + 1e-3 for one, peer in zip(ours, peers, strict=True))}


class _Oracle:
    """The demo model in transformers, with its adapters in PEFT."""

    def __init__(self, names: list[str], dtype: torch.dtype, device: torch.device) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import peft
            import transformers

            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                DEMO / "model", dtype=dtype, attn_implementation="eager"
            )
            model.to(device)
            for name in names:
                path = str(DEMO / "adapters" / name)
                if isinstance(model, peft.PeftModel):
                    model.load_adapter(path, name, torch_device=str(device))
                else:
                    model = peft.PeftModel.from_pretrained(model, path, adapter_name=name, torch_device=str(device))
        self._model, self._device = model.to(dtype).eval(), device

    @torch.inference_mode()
    def logits(self, tokens: list[int], adapter: str | None) -> torch.Tensor:
        """Logits after every token, float32 [tokens, vocab], in host memory."""
        ids = torch.tensor([tokens], device=self._device)
        if adapter is None:
            with self._model.disable_adapter():
                return self._model(ids, use_cache=False).logits[0].float().cpu()
        self._model.set_adapter(adapter)
        return self._model(ids, use_cache=False).logits[0].float().cpu()

    def greedy(self, prompt: list[int], count: int, adapter: str | None) -> tuple[list[int], list[float]]:
        """`count` greedy tokens and their margins. EOS does not end the sequence."""
        tokens, margins = list(prompt), []
        for _ in range(count):
            best = self.logits(tokens, adapter)[-1].topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return tokens[len(prompt) :], margins


def _repeated(run: Callable[[], torch.Tensor], memory: object) -> Any:
    """In place of a graph where there are none: a replay launches everything again, from the same buffers into one result."""
    result = run()
    return _Replay(run, result), result


class _Divisions:
    """Numbers of KV blocks that a runner's memory is divided into from now on."""

    def __init__(self, runner: ModelRunner) -> None:
        self.blocks: set[int] = set()
        self._divide = runner.divide
        runner.divide = self._noted  # type: ignore[method-assign]

    def _noted(self, kv_blocks: int, lora_bytes: int, moves: Sequence[tuple[int, int]]) -> None:
        self.blocks.add(kv_blocks)
        self._divide(kv_blocks, lora_bytes, moves)


@dataclass(frozen=True, slots=True)
class _Replay:
    run: Callable[[], torch.Tensor]
    result: torch.Tensor

    def replay(self) -> None:
        self.result.copy_(self.run())


def _runner(
    bed: Bed, kv_blocks: int, lora_bytes: int, max_loras: int, *, link: bool = False, assist: bool = False, **options: Any
) -> ModelRunner:
    """A runner for tests. On the CPU it gets a block more, in place of the scratch block that a GPU has."""
    runner = open_backend(
        BackendOptions(
            model_dir=DEMO / "model",
            device=bed.kind,
            block_size=BLOCK,
            kv_blocks=kv_blocks + bed.dry,
            lora_bytes=lora_bytes,
            max_lora_rank=64,
            max_loras=max_loras,
            kernels="reference" if bed.dry else "auto",
            link_bytes_per_s=LINK if link else 0.0,
            assist_cores=sorted(os.sched_getaffinity(0))[-1:] if assist else (),
            **{"dtype": "float32"} | options,
        )
    )
    assert isinstance(runner, ModelRunner)
    return runner


def _graphs(bed: Bed, runner: ModelRunner, *, prompts: bool = False) -> DecodeGraphs:
    """The decode graphs of the runner. Steps with prompts have graphs from the first on; in a dry run only with `prompts`."""
    steps: Any = runner.steps
    if bed.dry:
        cache, scratch_block = runner.memory.cache, runner.memory.cache.null_block - 1
        steps.graphs = DecodeGraphs(cache, runner.pool, scratch_block=scratch_block, memory=None)
        steps.graphs.capture = _repeated
        if prompts:
            cache.library = PagedAttention(cache, heads=runner.config.num_heads)
            steps.prompts = PromptGraphs(steps.model, cache, runner.pool, scratch_block=scratch_block, memory=None)
            steps.prompts.capture = _repeated
    if steps.prompts is not None:
        steps.prompts.after = 0
    graphs: DecodeGraphs = steps.graphs
    return graphs


def _prompt_graphs(runner: ModelRunner) -> int:
    steps: Any = runner.steps
    return 0 if steps.prompts is None else len(steps.prompts.captured)


def _host(name: str, runner: ModelRunner) -> HostAdapter:
    blob = stored_adapter(DEMO / "model", DEMO / "adapters" / name).blob
    return HostAdapter.from_blob(blob, runner.config, dtype=runner.dtype)


def _wait_for_processes(runner: ModelRunner) -> None:
    until_s = now_s() + PROCESS_S
    while runner.assist is None or not runner.assist.capacity.row_s or not runner.assist.capacity.processes:
        if now_s() > until_s:
            raise RuntimeError("CPU LoRA processes did not start")
        time.sleep(0.01)


def _serve(
    engine: Engine, wanted: list[Wanted], adapters: dict[str, HostAdapter], *, resume: bool
) -> tuple[list[list[int]], int, dict[str, int]]:
    """All tokens of each request, how many requests were preempted, and how requests with an unfinished adapter began."""
    outputs = []
    for number, one in enumerate(wanted):
        known = one.tokens[: len(one.tokens) // 2] if resume else []
        outputs.append(list(known))
        engine.add(
            EngineRequest.local(
                str(number),
                one.prompt,
                SamplingParams(max_tokens=len(one.tokens), temperature=0.0, ignore_eos=True),
                output=known,
                weights=None if one.adapter is None else adapters[one.adapter],
                gateway_id="g",
                arrival_s=now_s(),
                epoch=int(resume),
            ),
            now_s(),
        )
    preempted, modes = 0, dict[str, int]()
    while engine.has_work():
        output = engine.step(now_s())
        if output.failure is not None:
            raise output.failure
        preempted += output.stats.preempted
        for mode, _ in output.stats.cold_starts:
            modes[mode] = modes.get(mode, 0) + 1
        for item in output.items.get("g", []):
            if item.error is not None:
                raise RuntimeError(item.error.message)
            outputs[int(item.request_id)] += item.tokens
        engine.check()
        time.sleep(engine.pause_s)
    return outputs, preempted, modes


def _differences(wanted: list[Wanted], outputs: list[list[int]]) -> tuple[list[str], int]:
    """The requests that got other tokens, and the place of the first difference; and how many differ only after a near-tie."""
    different, ties = [], 0
    for number, (one, got) in enumerate(zip(wanted, outputs, strict=True)):
        if got == one.tokens:
            continue
        pairs = enumerate(zip(one.tokens, got, strict=False))
        at = next((i for i, (token, other) in pairs if token != other), min(len(got), len(one.tokens)))
        if at < min(len(got), len(one.margins)) and one.margins[at] < TIE:
            ties += 1
        else:
            different.append(
                f"request {number}, adapter {one.adapter}: {got[at : at + 3]} for {one.tokens[at : at + 3]} at {at}"
            )
    return different, ties


def _rows(tokens: list[int], start: int, end: int, slot: int) -> StepBatch:
    """A batch of the tokens start..end of a sequence in the first blocks, with logits for all of them."""
    positions = np.arange(start, end)
    blocks = -(-end // BLOCK)
    return StepBatch(
        token_ids=np.array(tokens[start:end]),
        positions=positions,
        row_slot=np.full(end - start, slot, dtype=np.int32),
        seq_starts=np.array([0, end - start], dtype=np.int32),
        context_lens=np.array([end], dtype=np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None, :],
        kv_slots=positions.copy(),
        logit_rows=np.arange(end - start),
    )


@dataclass(slots=True)
class _Error:
    """The relative error over everything that was added."""

    off2: float = 0.0
    all2: float = 0.0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        self.off2 += float((got.double() - want.double()).square().sum())
        self.all2 += float(want.double().square().sum())

    @property
    def value(self) -> float:
        return float((self.off2 / self.all2) ** 0.5)
