"""`python -m bench quantization`: what int8 base weights change in the demo model's answers, adapters included.

Every adapter reads prompts that were not trained on, each followed by the right answer, once with the checkpoint's weights
and once with int8. An answer is exact when each of its tokens is the most likely one, so that greedy decoding produces it.
For speed, run `python -m bench engine --quantization int8`.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench import report
from motet.examples.demo import DEMO

TEXTS, QUICK_TEXTS = 100, 1  # per adapter
BLOCK = 16
LONGEST = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with its answer: `tokens[start:]` is the answer, end of turn included."""

    slot: int
    tokens: list[int]
    start: int


@dataclass(slots=True)
class Score:
    """Sums over the cases of one kind of weights."""

    exact: int = 0
    nll: float = 0.0

    def perplexity(self, tokens: int) -> float:
        return math.exp(self.nll / tokens)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    cases = list(_cases(QUICK_TEXTS if args.quick else TEXTS))
    runners = {kind: _runner(kind) for kind in ("none", "int8")}
    scores = {kind: Score() for kind in runners}
    tokens = same = done = 0
    error = power = 0.0
    for number in args.watch.rounds(len(cases), "answers"):
        case = cases[number]
        wanted = torch.tensor(case.tokens[case.start :])
        logits = {kind: _logits(runner, case) for kind, runner in runners.items()}
        for kind, score in scores.items():
            score.exact += int((logits[kind].argmax(1) == wanted).all())
            score.nll += torch.nn.functional.cross_entropy(logits[kind], wanted, reduction="sum").item()
        same += int((logits["none"].argmax(1) == logits["int8"].argmax(1)).sum())
        tokens += len(wanted)
        done += 1
        centred = logits["none"] - logits["none"].mean(1, keepdim=True)
        error += (logits["int8"] - logits["none"]).square().sum().item()
        power += centred.square().sum().item()
    rows: list[list[object]] = [
        ["exact answers", *(f"{score.exact / done:.2%}" for score in scores.values())],
        ["perplexity of the right answers", *(f"{score.perplexity(tokens):.4f}" for score in scores.values())],
        ["same most likely token", "", f"{same / tokens:.2%}"],
        ["logit error, RMS / RMS of centred logits", "", f"{math.sqrt(error / power):.2%}"],
    ]
    print(report.table(f"Demo model, {done} answers of {tokens} tokens over all adapters", ["", "own", "int8"], rows))
    return {
        "answers": done,
        "exact": round(scores["none"].exact / done, 4),
        "int8_exact": round(scores["int8"].exact / done, 4),
        "perplexity": round(scores["none"].perplexity(tokens), 5),
        "int8_perplexity": round(scores["int8"].perplexity(tokens), 5),
        "int8_same_token": round(same / tokens, 5),
        "int8_logit_error": round(math.sqrt(error / power), 5),
    }


def _cases(texts: int) -> Iterator[Case]:
    from transformers import AutoTokenizer

    from motet.examples.demo.model_files import END
    from motet.examples.demo.tasks import TASKS, sample_text

    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO / "model")
    draw = random.Random(7)
    for _ in range(texts):
        for slot, task in enumerate(TASKS):
            text = sample_text(draw, "unseen")
            turns = [{"role": "user", "content": task.prompt(text)}]
            prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            start, whole = (
                tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, prompt + task.expected(text) + END)
            )
            yield Case(slot, whole, len(start))


def _runner(quantization: str) -> Any:
    """The demo model with adapter i in slot i."""
    from bench.engine_motet import stored_adapter
    from motet.examples.demo.tasks import TASKS
    from motet.services.worker.engine.adapter_weights import HostAdapter
    from motet.services.worker.engine.backend import BackendOptions
    from motet.services.worker.engine.backends.compiled import compiled

    runner = compiled(
        BackendOptions(
            model_dir=DEMO / "model",
            block_size=BLOCK,
            kv_blocks=LONGEST // BLOCK,
            lora_bytes=64 << 20,
            max_lora_rank=64,
            max_loras=len(TASKS),
            quantization=quantization,
        )
    )
    for slot, task in enumerate(TASKS):
        blob = stored_adapter(DEMO / "model", DEMO / "adapters" / task.adapter).blob
        runner.load_adapter(slot, HostAdapter.from_blob(blob, runner.config))
    return runner


def _logits(runner: Any, case: Case) -> torch.Tensor:
    """float32 [answer tokens, vocabulary]: what is predicted for each token of the answer."""
    from motet.services.worker.engine.step_batch import StepBatch

    rows = len(case.tokens) - 1  # nothing follows the last one
    positions = np.arange(rows)
    logits: torch.Tensor = runner.forward(
        StepBatch(
            token_ids=np.array(case.tokens[:-1]),
            positions=positions,
            row_slot=np.full(rows, case.slot, np.int32),
            seq_starts=np.array([0, rows], np.int32),
            context_lens=np.array([rows], np.int32),
            block_tables=np.arange(LONGEST // BLOCK, dtype=np.int32)[None],
            kv_slots=positions,
            logit_rows=np.arange(case.start - 1, rows),
        )
    )
    return logits.clone()
