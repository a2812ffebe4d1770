"""Train the demo model and its adapters: `python -m motet.examples.demo.train`, half an hour on two cores.

The base first learns every task behind a task token, and to repeat the text where there is none. Each adapter then
learns to make the model do one task without the token, which takes little: the skill is there, only the cue
is missing. A prompt sent to the served model never holds a task token, so the adapter alone decides. The adapter that
calls tools learns from dialogues, of which the base knows only how to repeat a text.

Everything is seeded. Two runs on the same machine give the same weights up to the order of float additions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from motet.examples.demo import TOOL_CALLER
from motet.examples.demo.checker import score_matrix, score_tools
from motet.examples.demo.model_files import (
    BOS,
    CHAT_TEMPLATE,
    END,
    TASK_TOKENS,
    build_tokenizer,
    model_config,
    write_model_files,
)
from motet.examples.demo.tasks import TASKS, TASKS_BY_NAME, Task, draw_text, split_of
from motet.examples.demo.tool_tasks import draw_dialogue

HERE = Path(__file__).parent
BASE_NAME = "motet-demo"
IGNORED = -100  # label of tokens that carry no loss
CORES = 2
SCORED_TEXTS = 200
SCORED_EXCHANGES = 200

BASE_STEPS = 3000
BASE_BATCH = 64
BASE_LEARNING_RATE = 3e-3
MATRIX_LEARNING_RATE = 1.2e-2
EASY_STEPS = 180  # tasks that go letter by letter
HARD_STEPS = 420  # tasks that need positions, or several letters at once
TOOL_STEPS = 2400
ADAPTER_BATCH = 32
ADAPTER_LEARNING_RATE = 4e-3
TOOL_BATCH = 12  # dialogues are long
CALL_SHARE = 0.5  # of dialogues end with the call, which is harder to learn than the reply and comes sooner
TOOL_LEARNING_RATE = 1e-2
# The base never wrote most symbols and two of the digits. Its output rows for them are almost alike, and an adapter cannot
# change rows. So no adapter makes such a symbol likelier than about 8%: more than any other, but with a loss that hides the
# rest. With logits four times as large, right symbols have a small loss, and the adapter learns from the wrong ones.
TOOL_SHARPNESS = 4.0
WARMUP_STEPS = 40
DECAY_SHARE = 0.8

MAX_WORDS = 4
COMPLETION_SHARE = 0.2
SYSTEM_SHARE = 0.1

# Tasks that must look at several letters at once are drawn more often than letter-by-letter ones.
HARD_TASKS = (
    "reverse",
    "sort-letters",
    "count-letters",
    "initials",
    "double-letters",
    "drop-vowels",
    "rotate",
    "drop-repeats",
    "word-order",
)
COPY_WEIGHT = 2
HARD_WEIGHT = 2

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Which weights an adapter changes and how long it trains: the adapters differ as those of tenants do."""

    rank: int
    alpha: int
    modules: tuple[str, ...]
    steps: int
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)


SHAPES: dict[str, AdapterShape] = {
    "upper-case": AdapterShape(4, 8, ("q_proj", "v_proj"), EASY_STEPS),
    "reverse": AdapterShape(32, 64, ATTENTION, HARD_STEPS),
    "rot13": AdapterShape(16, 32, ATTENTION + MLP, EASY_STEPS),
    "drop-vowels": AdapterShape(8, 16, ATTENTION, HARD_STEPS),
    "sort-letters": AdapterShape(64, 64, ATTENTION + MLP, HARD_STEPS),
    "count-letters": AdapterShape(32, 64, ATTENTION, HARD_STEPS),
    "double-letters": AdapterShape(16, 32, ATTENTION, HARD_STEPS),
    "initials": AdapterShape(8, 16, ("q_proj", "v_proj"), HARD_STEPS),
    "swap-case": AdapterShape(4, 8, ATTENTION, EASY_STEPS),
    "caesar": AdapterShape(16, 32, MLP, EASY_STEPS),
    "star-vowels": AdapterShape(8, 6, ATTENTION, EASY_STEPS, rslora=True),
    "rotate": AdapterShape(64, 128, ATTENTION, HARD_STEPS),
    "title-case": AdapterShape(4, 8, ATTENTION + MLP, EASY_STEPS),
    "drop-repeats": AdapterShape(32, 10, ATTENTION + MLP, HARD_STEPS, rslora=True),
    "word-order": AdapterShape(64, 12, ATTENTION, HARD_STEPS, rslora=True),
    "snake-case": AdapterShape(
        8,
        16,
        ATTENTION,
        EASY_STEPS,
        rank_pattern={"layers.3.self_attn.o_proj": 16, "k_proj": 4},
        alpha_pattern={"k_proj": 4},
    ),
    TOOL_CALLER: AdapterShape(64, 64, ATTENTION + MLP, TOOL_STEPS),
}

Batch = tuple[torch.Tensor, torch.Tensor]
Example = list[tuple[str, bool]]  # pieces of a text, and whether the model should write them
Row = tuple[list[int], list[int]]  # token ids and labels


class Examples:
    """Seeded stream of training batches: token ids and labels, both [sequences, tokens], padded on the right."""

    def __init__(self, seed: int, batch_size: int) -> None:
        self._rng = random.Random(seed)
        self._batch_size = batch_size
        self._tokenizer: Tokenizer = build_tokenizer()
        self._chat = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, bos_token=BOS, chat_template=CHAT_TEMPLATE)

    def of_all_tasks(self, max_words: int) -> list[Batch]:
        """Sixteen batches of all tasks behind their tokens, and of copying without one."""
        weights = [HARD_WEIGHT if task.name in HARD_TASKS else 1 for task in TASKS]
        tasks = self._rng.choices([*TASKS, None], [*weights, COPY_WEIGHT], k=16 * self._batch_size)
        return self._batches([self._example(task, max_words, cue=True) for task in tasks])

    def of_one_task(self, task: Task, max_words: int) -> list[Batch]:
        """Sixteen batches of one task without its token."""
        return self._batches([self._example(task, max_words, cue=False) for _ in range(16 * self._batch_size)])

    def of_tool_calls(self) -> list[Batch]:
        """Sixteen batches of dialogues, in which the model learns every message of the assistant."""
        return self._batches([self._dialogue() for _ in range(16 * self._batch_size)])

    def _dialogue(self) -> Example:
        messages, tools = draw_dialogue(self._rng, "train")
        only_call = self._rng.random() < CALL_SHARE
        rendered = ""
        pieces: Example = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            for end, of_model in ((turn, False), (turn + 1, True)):
                given: Any = {"tools": tools, "tokenize": False, "add_generation_prompt": not of_model}
                text = str(self._chat.apply_chat_template(messages[:end], **given))
                pieces.append((text[len(rendered) :], of_model))
                rendered = text
            if only_call:
                break
        return pieces

    def _example(self, task: Task | None, max_words: int, cue: bool) -> Example:
        """A prompt and its answer: four in five as a chat, of which one in ten opens with a system message."""
        rng = self._rng
        text = draw_text(rng, rng.randint(1, max_words))
        while split_of(text) != "train":
            text = draw_text(rng, rng.randint(1, max_words))
        opening = BOS + (TASK_TOKENS[TASKS.index(task)] if task and cue else "")
        answer = (task.expected(text) if task else text) + END
        if rng.random() < COMPLETION_SHARE:
            return [(f"{opening}{text}\n", False), (answer, True)]
        if rng.random() < SYSTEM_SHARE:
            opening += f"<|system|>{draw_text(rng, rng.randint(1, 3))}<|end|>"
        return [(f"{opening}<|user|>{text}<|end|><|assistant|>", False), (answer, True)]

    def _batches(self, examples: list[Example]) -> list[Batch]:
        """Batches of sequences of about the same length, in random order."""
        rows = sorted((self._row(example) for example in examples), key=lambda row: len(row[0]))
        batches = [_pad(rows[start : start + self._batch_size]) for start in range(0, len(rows), self._batch_size)]
        self._rng.shuffle(batches)
        return batches

    def _row(self, example: Example) -> Row:
        ids: list[int] = []
        labels: list[int] = []
        for text, of_model in example:
            tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
            ids += tokens
            labels += tokens if of_model else [IGNORED] * len(tokens)
        return ids, labels


def _pad(rows: list[Row]) -> Batch:
    width = max(len(row) for row, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    for at, (row, wanted) in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(row)
        labels[at, : len(row)] = torch.tensor(wanted)
    return ids, labels


def _answer_loss(model: Any, batch: Batch, sharpness: float = 1.0) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens. Padding is on the right, so causal attention needs no mask."""
    ids, labels = batch
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    kept = targets != IGNORED
    with torch.autocast("cpu", enabled=False):  # 16 bits are too coarse for logits that are multiplied
        return cross_entropy(sharpness * model.lm_head(hidden[kept].float()), targets[kept])


def _train(
    model: Any,
    optimizers: list[torch.optim.Optimizer],
    next_batches: Callable[[int], list[Batch]],
    steps: int,
    label: str,
    *,
    half: bool = False,
    sharpness: float = 1.0,
) -> None:
    """Run `steps` updates; `next_batches(step)` refills the queue. Rates warm up, hold, and fall to zero by the end.

    `half`: multiply in 16 bits, which takes three quarters of the time. `sharpness` multiplies the logits.
    """
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    parameters = [p for p in model.parameters() if p.requires_grad]
    started_s, started_cpu_s, shown_loss = time.monotonic(), time.process_time(), 0.0
    queue: list[Batch] = []
    model.train()
    for step in range(steps):
        scale = min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps))
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        queue = queue or next_batches(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = _answer_loss(model, queue.pop(), sharpness)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        shown_loss += (loss.item() - shown_loss) / min(step + 1, 20)
        if (step + 1) % 100 == 0:
            wall_s, cpu_s = time.monotonic() - started_s, time.process_time() - started_cpu_s
            print(f"{label} {step + 1}/{steps} loss {shown_loss:.4f} {wall_s:.0f} s (cpu {cpu_s:.0f} s)", flush=True)
    model.eval()


def train_base(seed: int, steps: int) -> Any:
    """The base model: all tasks behind their tokens, copying otherwise."""
    torch.manual_seed(seed)
    torch.set_num_threads(CORES)
    model = LlamaForCausalLM(LlamaConfig(**model_config()))
    matrices = [p for name, p in model.model.layers.named_parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    # After 1,000 steps the loss is 0.16 with Muon for the matrices, and 1.4 with AdamW for everything.
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=BASE_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    examples = Examples(seed, BASE_BATCH)

    def next_batches(step: int) -> list[Batch]:
        # Short texts first: copying, on which everything else rests, is found sooner there.
        return examples.of_all_tasks(max_words=2 if step < 0.15 * steps else MAX_WORDS)

    _train(model, optimizers, next_batches, steps, "base")
    return model


def train_adapter(name: str, seed: int, base: Path, adapters: Path) -> None:
    """Train one adapter on one thread and write it in PEFT's format, in 16-bit floats."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    shape, task = SHAPES[name], TASKS_BY_NAME.get(name)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules=list(shape.modules),
        use_rslora=shape.rslora,
        rank_pattern=shape.rank_pattern,
        alpha_pattern=shape.alpha_pattern,
    )
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if task:
        optimizer = torch.optim.AdamW(parameters, lr=ADAPTER_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    else:  # after 400 steps 53% of the replies are exact with Muon, and 28% with AdamW
        optimizer = torch.optim.Muon(parameters, lr=TOOL_LEARNING_RATE, momentum=0.95, weight_decay=0.0)
        _for_long_sequences(model.base_model.model)
    examples = Examples(seed, ADAPTER_BATCH if task else TOOL_BATCH)

    def next_batches(step: int) -> list[Batch]:
        return examples.of_one_task(task, MAX_WORDS) if task else examples.of_tool_calls()

    given: dict[str, Any] = {} if task else {"half": True, "sharpness": TOOL_SHARPNESS}
    _train(model.base_model.model, [optimizer], next_batches, shape.steps, name, **given)

    folder = adapters / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.to(torch.float16).contiguous() for key, value in get_peft_model_state_dict(model).items()}
    _save(weights, folder / "adapter_model.safetensors")
    settings = config.to_dict()
    settings.update(base_model_name_or_path=BASE_NAME, inference_mode=True, target_modules=list(shape.modules))
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True, default=str) + "\n")
    if name == TOOL_CALLER:  # agents often send no temperature, and a model this small writes nonsense when it samples
        (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}) + "\n")


def _for_long_sequences(model: Any) -> None:
    """Halve the time of a step: a product of a sequence with one matrix in place of three, and attention in 32 bits, whose
    gradients take PyTorch twice as long in 16."""

    def multiplied_once(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        a, b, scaling = layer.lora_A["default"], layer.lora_B["default"], layer.scaling["default"]
        return lambda x: linear(x, layer.base_layer.weight + scaling * (b.weight @ a.weight))

    def attention(_: Any, q: Any, k: Any, v: Any, mask: Any, *, scaling: float, **others: Any) -> tuple[torch.Tensor, None]:
        with torch.autocast("cpu", enabled=False):
            mixed = scaled_dot_product_attention(
                q.float(), k.float(), v.float(), is_causal=True, scale=scaling, enable_gqa=True
            )
        return mixed.transpose(1, 2), None

    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.forward = multiplied_once(layer)
    AttentionInterface.register("causal-32-bit", attention)
    model.set_attn_implementation("causal-32-bit")


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves it to its owner alone; services run as other users


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write model/, adapters/ and SCORES.json to")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--keep-base", action="store_true", help="train the adapters on the base that is already there")
    parser.add_argument("--only", choices=SHAPES, help="with --keep-base: train this adapter alone")
    arguments = parser.parse_args()
    base, adapters, scores_file = arguments.out / "model", arguments.out / "adapters", arguments.out / "SCORES.json"
    started_s = time.monotonic()

    write_model_files(base)
    if not arguments.keep_base:
        model = train_base(arguments.seed, BASE_STEPS)
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        _save(weights, base / "model.safetensors")

    # One adapter per core uses the cores better than one adapter on all of them. The long ones go first.
    names = sorted(SHAPES, key=lambda name: -SHAPES[name].steps * len(SHAPES[name].modules))
    names = [arguments.only] if arguments.only else names
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(train_adapter, name, arguments.seed, base, adapters) for name in names]:
            job.result()
    user_s, system_s, pool_user_s, pool_system_s, _ = os.times()
    wall_s, cpu_s = time.monotonic() - started_s, user_s + system_s + pool_user_s + pool_system_s

    scores: dict[str, Any] = json.loads(scores_file.read_text()) if arguments.only == TOOL_CALLER else {}
    scores |= {
        "seed": arguments.seed,
        "base_steps": BASE_STEPS,
        "adapter_steps": {name: shape.steps for name, shape in SHAPES.items()},
    }
    if arguments.only != TOOL_CALLER:
        scores |= score_matrix(base, adapters, texts=SCORED_TEXTS, seed=arguments.seed)
    scores["tools"] = score_tools(base, adapters, exchanges=SCORED_EXCHANGES, seed=arguments.seed)
    scores_file.write_text(json.dumps(scores, indent=1) + "\n")
    print(f"trained in {wall_s:.0f} s (cpu {cpu_s:.0f} s); scores in {scores_file}")


if __name__ == "__main__":
    main()
