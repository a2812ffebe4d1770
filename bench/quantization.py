"""`python -m bench quantization`: the effect of 8- and 4-bit base weights, and of an int8 KV cache, on the demo model's
answers.

Every adapter reads prompts that were not trained on, each followed by the right answer: with the checkpoint's weights, with
int8, with int4, and with the checkpoint's weights over a KV cache in int8. An answer is exact when each of its tokens is the
most likely one, so that greedy decoding produces it. The perplexity is that of the answers: prompts of this model are drawn,
not written, so nothing predicts them.
For speed, run `python -m bench engine`.
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

KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "kv_int8": {"kv_cache_dtype": "int8"},
}
TEXTS, QUICK_TEXTS = 100, 1  # per adapter
BLOCK = 16
LONGEST = 512


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt with its answer. `tokens[start:]` is the answer, including the end of turn."""

    slot: int
    tokens: list[int]
    start: int


@dataclass(slots=True)
class Score:
    """Sums over the cases of one kind of quantization. `same` and `error` compare with the unquantized checkpoint."""

    exact: int = 0
    nll: float = 0.0
    same: int = 0
    error: float = 0.0

    def perplexity(self, tokens: int) -> float:
        return math.exp(self.nll / tokens)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return the figures."""
    cases = list(_cases(QUICK_TEXTS if args.quick else TEXTS))
    runners = {kind: _runner(**options) for kind, options in KINDS.items()}
    scores = {kind: Score() for kind in KINDS}
    tokens = done = 0
    power = 0.0
    for number in args.watch.rounds(len(cases), "answers"):
        case = cases[number]
        wanted = torch.tensor(case.tokens[case.start :])
        logits = {kind: _logits(runner, case) for kind, runner in runners.items()}
        own = logits["none"]
        for kind, score in scores.items():
            best = logits[kind].argmax(1)
            score.exact += int((best == wanted).all())
            score.nll += torch.nn.functional.cross_entropy(logits[kind], wanted, reduction="sum").item()
            score.same += int((best == own.argmax(1)).sum())
            score.error += (logits[kind] - own).square().sum().item()
        tokens += len(wanted)
        done += 1
        power += (own - own.mean(1, keepdim=True)).square().sum().item()
    own_perplexity = scores["none"].perplexity(tokens)
    table: list[list[object]] = [
        ["exact answers", *(f"{score.exact / done:.2%}" for score in scores.values())],
        ["perplexity of the right answers", *(f"{score.perplexity(tokens):.4f}" for score in scores.values())],
        ["same most likely token", *(f"{score.same / tokens:.2%}" for score in scores.values())],
        ["logit error, RMS / RMS of centred logits", *(f"{math.sqrt(score.error / power):.2%}" for score in scores.values())],
    ]
    title = f"Demo model, {done} answers of {tokens} tokens over all adapters"
    print(report.table(title, ["", "own", *list(KINDS)[1:]], table))
    found: dict[str, Any] = {"answers": done, "perplexity": round(own_perplexity, 5)}
    found["exact"] = round(scores["none"].exact / done, 4)
    for kind in list(KINDS)[1:]:
        score = scores[kind]
        found[f"exact_{kind}"] = round(score.exact / done, 4)
        found[f"perplexity_ratio_{kind}"] = round(score.perplexity(tokens) / own_perplexity, 5)
        found[f"same_token_{kind}"] = round(score.same / tokens, 5)
        found[f"logit_error_{kind}"] = round(math.sqrt(score.error / power), 5)
    return found


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


def _runner(**options: Any) -> Any:
    """A runner with the demo model and adapter i in slot i."""
    from bench.stored_adapters import stored_adapter
    from motet.examples.demo.tasks import TASKS
    from motet.services.worker.engines.adapter_weights import HostAdapter
    from motet.services.worker.native.backend import BackendOptions
    from motet.services.worker.native.backends.compiled import compiled

    runner = compiled(
        BackendOptions(
            model_dir=DEMO / "model",
            block_size=BLOCK,
            kv_blocks=LONGEST // BLOCK,
            lora_bytes=64 << 20,
            max_lora_rank=64,
            max_loras=len(TASKS),
            **options,
        )
    )
    for slot, task in enumerate(TASKS):
        blob = stored_adapter(DEMO / "model", DEMO / "adapters" / task.adapter).blob
        runner.load_adapter(slot, HostAdapter.from_blob(blob, runner.config))
    return runner


def _logits(runner: Any, case: Case) -> torch.Tensor:
    """float32 [answer tokens, vocabulary]: the predictions for each token of the answer."""
    from motet.services.worker.native.step_batch import StepBatch

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
