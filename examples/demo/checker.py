"""Score the demo model and its adapters with `transformers` and `peft`, as an independent reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from motet.examples.demo.tasks import TASKS, Task, sample_text

BASE = "base"  # row of the score matrix: the model without an adapter
ANSWER_TOKENS = 64  # longer than any answer to a text that `sample_text` draws


class Checker:
    """The demo model with all its adapters loaded, in fp32."""

    def __init__(self, base: Path, adapters: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        first, *others = TASKS
        self._model: Any = PeftModel.from_pretrained(model, str(adapters / first.adapter), adapter_name=first.adapter)
        for task in others:
            self._model.load_adapter(str(adapters / task.adapter), adapter_name=task.adapter)
        self._model.eval()

    def answer(self, adapter: str, prompts: Sequence[str], chat: bool = True) -> list[str]:
        """Greedy answers to the prompts, of an adapter or of `BASE`, as chats or as plain completions."""
        texts = [self._render(prompt) for prompt in prompts] if chat else list(prompts)
        batch = self._tokenizer(texts, add_special_tokens=not chat, padding=True, return_tensors="pt")
        if adapter == BASE:
            with self._model.disable_adapter():
                output = self._generate(batch)
        else:
            self._model.set_adapter(adapter)
            output = self._generate(batch)
        answers = output[:, batch["input_ids"].shape[1] :]
        return list(self._tokenizer.batch_decode(answers, skip_special_tokens=True))

    def _render(self, prompt: str) -> str:
        turns = [{"role": "user", "content": prompt}]
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    @torch.inference_mode()
    def _generate(self, batch: Any) -> torch.Tensor:
        output: torch.Tensor = self._model.generate(**batch, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        return output


def exact_match(task: Task, texts: Sequence[str], answers: Sequence[str]) -> float:
    """Share of the answers, in [0, 1], that are the task's own answer to the text."""
    return sum(task.expected(text) == answer for text, answer in zip(texts, answers, strict=True)) / len(texts)


def score_matrix(base: Path, adapters: Path, texts: int, seed: int) -> dict[str, Any]:
    """Exact match of the base and of every adapter on every task, over `texts` unseen inputs.

    All tasks share their inputs and prompts, so one set of answers per adapter is compared with every task.
    """
    rng = random.Random(seed)
    inputs = [sample_text(rng, "unseen") for _ in range(texts)]
    checker = Checker(base, adapters)
    prompts = [TASKS[0].prompt(text) for text in inputs]
    chat: dict[str, dict[str, float]] = {}
    completion: dict[str, float] = {}
    for adapter in [BASE, *(task.adapter for task in TASKS)]:
        answers = checker.answer(adapter, prompts)
        chat[adapter] = {task.name: exact_match(task, inputs, answers) for task in TASKS}
    for task in TASKS:
        completion[task.adapter] = exact_match(task, inputs, checker.answer(task.adapter, prompts, chat=False))
    return {"unseen_inputs": texts, "chat": chat, "completion": completion}
