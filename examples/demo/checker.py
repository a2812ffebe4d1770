"""Score the demo model and its adapters with `transformers` and `peft`, as an independent reference."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from motet.examples.demo import TOOL_CALLER
from motet.examples.demo.tasks import TASKS, Task, sample_text
from motet.examples.demo.tool_tasks import Exchange, draw_exchange

BASE = "base"  # row of the score matrix: the model without an adapter
ANSWER_TOKENS = 64  # longer than any answer to a text that `sample_text` draws
CALL_TOKENS = 144  # longer than any call or reply to what `draw_exchange` draws


class Checker:
    """The demo model with all its adapters loaded, in fp32."""

    def __init__(self, base: Path, adapters: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        first, *others = [*(task.adapter for task in TASKS), TOOL_CALLER]
        self._model: Any = PeftModel.from_pretrained(model, str(adapters / first), adapter_name=first)
        for name in others:
            self._model.load_adapter(str(adapters / name), adapter_name=name)
        self._model.eval()

    def answer(self, adapter: str, prompts: Sequence[str], chat: bool = True) -> list[str]:
        """Greedy answers to the prompts, of an adapter or of `BASE`, as chats or as plain completions."""
        texts = [self.render([{"role": "user", "content": prompt}]) for prompt in prompts] if chat else list(prompts)
        batch = self._tokenizer(texts, add_special_tokens=not chat, padding=True, return_tensors="pt")
        return self._texts(adapter, batch, ANSWER_TOKENS)

    def continued(self, adapter: str, rendered: Sequence[str]) -> list[str]:
        """Greedy answers of an adapter to conversations that `render` made."""
        batch = self._tokenizer(list(rendered), add_special_tokens=False, padding=True, return_tensors="pt")
        return self._texts(adapter, batch, CALL_TOKENS)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt of a conversation."""
        given: Any = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        return str(self._tokenizer.apply_chat_template(messages, **given))

    @torch.inference_mode()
    def _texts(self, adapter: str, batch: Any, tokens: int) -> list[str]:
        def generated() -> torch.Tensor:
            output: torch.Tensor = self._model.generate(**batch, do_sample=False, max_new_tokens=tokens)
            return output[:, batch["input_ids"].shape[1] :]

        if adapter == BASE:
            with self._model.disable_adapter():
                answers = generated()
        else:
            self._model.set_adapter(adapter)
            answers = generated()
        return list(self._tokenizer.batch_decode(answers, skip_special_tokens=True))


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


def tool_scores(checker: Checker, exchanges: Sequence[Exchange]) -> dict[str, float]:
    """Shares, in [0, 1], of right calls, of right replies (to all results and to those with digits) and of right refusals."""
    with_tool = [exchange for exchange in exchanges if exchange.name]
    without = [exchange for exchange in exchanges if not exchange.name]
    with_digits = [exchange for exchange in with_tool if re.search(r"\d", exchange.result)]
    calls = [f"<tool_call>{json.dumps(one.function(), ensure_ascii=False)}</tool_call>" for one in with_tool]
    replies = dict(zip(with_tool, _continued(checker, with_tool, 3), strict=True))
    return {
        "calls": _share(_continued(checker, with_tool, 1), calls),
        "replies": _share([replies[one] for one in with_tool], [one.reply for one in with_tool]),
        "replies_with_digits": _share([replies[one] for one in with_digits], [one.reply for one in with_digits]),
        "refusals": _share(_continued(checker, without, 1), [one.reply for one in without]),
    }


def _continued(checker: Checker, exchanges: Sequence[Exchange], messages: int) -> list[str]:
    """The adapter's answers to the first messages of each exchange."""
    return checker.continued(TOOL_CALLER, [checker.render(one.messages()[:messages], one.declared()) for one in exchanges])


def _share(given: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(one == other for one, other in zip(given, wanted, strict=True)) / len(wanted)


def score_tools(base: Path, adapters: Path, exchanges: int, seed: int) -> dict[str, Any]:
    """`tool_scores` on exchanges with unseen values."""
    rng = random.Random(seed)
    drawn = [draw_exchange(rng, "unseen") for _ in range(exchanges)]
    return {"unseen_exchanges": exchanges} | tool_scores(Checker(base, adapters), drawn)
