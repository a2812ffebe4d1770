"""Tiny random checkpoints and PEFT adapters, transformers and peft as the oracle, and a minimal step loop.

model_dir = make_checkpoint("qwen3", tmp_path)
adapters = make_adapters(model_dir, tmp_path)          8 of them: PEFT directories and motet-lora/2 blobs
oracle = Oracle(model_dir, adapters)
oracle.logits(tokens, adapters[0])                     float32 [len(tokens), vocab]
oracle.greedy(prompt, 16, None)                        16 tokens of the base model
"""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.native.backend import BackendOptions
from motet.services.worker.native.backends import open_backend
from motet.services.worker.native.runner import ModelRunner
from motet.services.worker.native.step_batch import StepBatch
from motet.shared.adapter_blob import write_blob
from motet.shared.model import MODULES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # third-party import-time warnings are not ours to fix
    import peft
    import transformers

VOCAB = 211
MAX_LEN = 256

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

# family -> (transformers name, config changes, stored dtype, shard size)
_FAMILIES: dict[str, tuple[str, dict[str, Any], torch.dtype, str]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}, torch.float16, "1GB"),
    "llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}, torch.bfloat16, "1GB"),
    "llama-linear-biased": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
        torch.float32,
        "100KB",
    ),
    "mistral": ("Mistral", {"sliding_window": 19, "head_dim": 24}, torch.bfloat16, "100KB"),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": _YARN_ROPE}, torch.bfloat16, "1GB"),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
        torch.float32,
        "1GB",
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, torch.bfloat16, "100KB"),
    "qwen3-dynamic": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        torch.float16,
        "1GB",
    ),
}
FAMILIES = tuple(_FAMILIES)


@dataclass(frozen=True)
class AdapterFixture:
    """One random adapter, as PEFT saves it and as the registry stores it."""

    name: str
    path: Path  # PEFT directory
    blob: bytes  # motet-lora/2


def make_checkpoint(family: str, directory: Path, *, seed: int = 0, **sizes: int) -> Path:
    """A random Hugging Face checkpoint of `family` (one of FAMILIES) below `directory`; norms and biases are random too.

    `sizes` replace those of the family's configuration.
    """
    name, changes, dtype, shard = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**_SMALL | changes | sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:  # all ones or zeros so far: a mix-up would not show
                parameter.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.2)
    path = directory / family
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to(dtype).save_pretrained(path, max_shard_size=shard)
    return path


def make_adapters(model_dir: Path, directory: Path, *, seed: int = 1) -> list[AdapterFixture]:
    """Eight random adapters for the checkpoint: ranks 4 to 64, different targets, patterns, rsLoRA, skipped layers."""
    attention, mlp = list(MODULES[:4]), list(MODULES[4:])
    configs: list[dict[str, Any]] = [
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        {"r": 8, "lora_alpha": 8, "target_modules": attention},
        {"r": 16, "lora_alpha": 32, "target_modules": list(MODULES)},
        {"r": 64, "lora_alpha": 64, "target_modules": list(MODULES)},
        {"r": 12, "lora_alpha": 24, "target_modules": mlp, "use_rslora": True},
        {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": list(MODULES),
            "rank_pattern": {"q_proj": 32, "layers.1.mlp.down_proj": 20},
            "alpha_pattern": {"k_proj": 4, "layers.2.self_attn.o_proj": 40},
        },
        {"r": 24, "lora_alpha": 12, "target_modules": ["o_proj", "down_proj"], "use_rslora": True},
        {"r": 32, "lora_alpha": 32, "target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [1]},
    ]
    model = _load(model_dir)
    adapters = []
    for number, config in enumerate(configs):
        torch.manual_seed(seed * 100 + number)
        name = f"adapter-{number}-r{config['r']}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config)
            adapted = peft.get_peft_model(model, lora)
            with torch.no_grad():
                for key, parameter in adapted.named_parameters():
                    if "lora_" in key:  # strong enough to change most tokens
                        parameter.normal_(0.0, 0.15)
            adapted.save_pretrained(directory / name)
            adapters.append(AdapterFixture(name, directory / name, _blob(adapted)))
            model = adapted.unload()
            if hasattr(model, "peft_config"):
                del model.peft_config
    return adapters


def _blob(adapted: Any) -> bytes:
    """The adapter in the form motet-lora/2, with the scales that peft computed."""
    pairs = {}
    for key, module in adapted.named_modules():
        if not hasattr(module, "lora_A") or "default" not in module.lora_A:
            continue
        parts = key.split(".")
        layer, name = int(parts[parts.index("layers") + 1]), parts[-1]
        a, b = (half["default"].weight.detach().numpy() for half in (module.lora_A, module.lora_B))
        pairs[layer, name] = (module.scaling["default"], a, b)
    return write_blob(pairs, dtype="F32", layers=adapted.config.num_hidden_layers)


def _load(model_dir: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


class Oracle:
    """The checkpoint in fp32 under transformers, adapters under peft: the definition of a right answer."""

    def __init__(self, model_dir: Path, adapters: list[AdapterFixture]) -> None:
        self._known: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = {}  # what it was asked before
        self._model = _load(model_dir)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for adapter in adapters:
                if isinstance(self._model, peft.PeftModel):
                    self._model.load_adapter(adapter.path, adapter.name)
                else:
                    self._model = peft.PeftModel.from_pretrained(self._model, adapter.path, adapter_name=adapter.name)
        self._model.eval()

    def logits(self, tokens: list[int], adapter: AdapterFixture | None) -> torch.Tensor:
        """Logits after every token, float32 [len(tokens), vocab]."""
        question = adapter and adapter.name, tuple(tokens)
        if question not in self._known:
            self._known[question] = self._logits(tokens, adapter)
        return self._known[question]

    @torch.inference_mode()
    def _logits(self, tokens: list[int], adapter: AdapterFixture | None) -> torch.Tensor:
        ids = torch.tensor([tokens])
        if adapter is None:
            if not isinstance(self._model, peft.PeftModel):
                return self._model(ids, use_cache=False).logits[0]
            with self._model.disable_adapter():
                return self._model(ids, use_cache=False).logits[0]
        self._model.set_adapter(adapter.name)
        return self._model(ids, use_cache=False).logits[0]

    def greedy(self, prompt: list[int], count: int, adapter: AdapterFixture | None) -> list[int]:
        """The `count` most likely tokens after `prompt`, one at a time; EOS does not end it."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, adapter)[-1].argmax()))
        return tokens[len(prompt) :]


def random_prompts(count: int, *, seed: int = 0, shortest: int = 1, longest: int = 60) -> list[list[int]]:
    """Token lists of different lengths, without special tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def make_runner(model_dir: Path, adapters: list[AdapterFixture], **changes: Any) -> ModelRunner:
    """A float32 runner with adapter i in slot i."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 8,
        "kv_blocks": 600,
        "lora_bytes": 8 << 20,
        "max_lora_rank": 128,
        "max_loras": 16,
    }
    runner = open_backend(BackendOptions(model_dir=model_dir, **options | changes))
    assert isinstance(runner, ModelRunner)
    for slot, adapter in enumerate(adapters):
        runner.load_adapter(slot, HostAdapter.from_blob(adapter.blob, runner.config))
    return runner


@dataclass
class Sequence:
    """One request of `drive`: `slot` -1 for the base. `logits` collects one row per computed position asked for."""

    prompt: list[int]
    slot: int
    count: int
    output: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    done: int = 0  # tokens whose K and V are written
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def drive(runner: ModelRunner, sequences: list[Sequence], *, chunk: int, block_size: int = 8, seed: int = 0) -> None:
    """Run all sequences to `count` greedy tokens: prefill in chunks of `chunk`, decode together, scattered KV blocks.

    The logits of every row are kept in `Sequence.logits`: those of position i are `logits[i]`. Sequence j joins at step j // 3,
    so that prefill and decode rows mix. The order of sequences is shuffled in every step.
    """
    draw = random.Random(seed)
    free = list(range(600))
    draw.shuffle(free)
    for step in itertools.count():
        live = [s for j, s in enumerate(sequences) if j // 3 <= step and len(s.output) < s.count]
        if not live and step > len(sequences) // 3:
            return
        draw.shuffle(live)
        takes = [min(chunk, len(s.tokens) - s.done) for s in live]
        for sequence, take in zip(live, takes, strict=True):
            while len(sequence.blocks) * block_size < sequence.done + take:
                sequence.blocks.append(free.pop())
        logits = runner.forward(step_batch(live, takes, block_size)).clone()
        at = 0
        for sequence, take in zip(live, takes, strict=True):
            sequence.logits.extend(logits[at : at + take])
            sequence.done += take
            at += take
            if sequence.done == len(sequence.tokens):
                sequence.output.append(int(sequence.logits[-1].argmax()))


def step_batch(live: list[Sequence], takes: list[int], block_size: int) -> StepBatch:
    """A batch of the next `takes[i]` tokens of every sequence, with logits for all rows."""
    rows = sum(takes)
    tables = np.zeros((len(live), max((len(s.blocks) for s in live), default=1)), dtype=np.int32)
    tokens, positions, slots, kv_slots = [], [], [], []
    for i, (sequence, take) in enumerate(zip(live, takes, strict=True)):
        tables[i, : len(sequence.blocks)] = sequence.blocks
        for position in range(sequence.done, sequence.done + take):
            tokens.append(sequence.tokens[position])
            positions.append(position)
            slots.append(sequence.slot)
            kv_slots.append(sequence.blocks[position // block_size] * block_size + position % block_size)
    return StepBatch(
        token_ids=np.array(tokens, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        row_slot=np.array(slots, dtype=np.int32),
        seq_starts=np.cumsum([0, *takes]).astype(np.int32),
        context_lens=np.array([s.done + t for s, t in zip(live, takes, strict=True)], dtype=np.int32),
        block_tables=tables,
        kv_slots=np.array(kv_slots, dtype=np.int64),
        logit_rows=np.arange(rows, dtype=np.int64),
    )
