"""A proxy model: an encoder that reads the prompt's text and gives the distribution of the answer's length.

    tokens ─► encoder (any local Hugging Face one) ─► mean and first state ─► linear ─► softmax over CLASSES lengths

`train` fine-tunes all but the embeddings; `Proxy` predicts, in batches. A directory of `train` holds the encoder and its
tokenizer as `transformers` writes them, `head.safetensors` and `proxy.json`. Chameleon (section 4.3) uses such a BERT model.
This module alone imports torch in the predictor, and only with --predictor-proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from motet.policies.lengths.features import excerpt
from motet.policies.lengths.model import Curve
from motet.services.predictor.examples import Example
from motet.shared.config import ConfigError

try:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    raise ConfigError(f"a proxy model needs torch and transformers (pip install 'motet[proxy]'): {error}") from None

transformers_logging.disable_progress_bar()
CLASSES = 15
TEXT_TOKENS = 96
SMOOTHING = 0.7  # classes: how far the target of a length reaches into its neighbours
LEARNING_RATE, HEAD_RATE = 2e-4, 2e-3
WARM_UP = 0.1  # of all steps
BATCH = 32
BUCKET = 16  # batches among which prompts are sorted by length, so that little is padded
HELD_OUT = 0.05  # of the requests, for the calibration


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`proxy.json`: thresholds, the longest length seen, and the levels of requests that were held out."""

    edges: list[float]
    longest: float
    levels: list[float]
    trained_on: int
    version: int = 1


class Proxy:
    """A trained model on one device. Not thread-safe: one batch at a time."""

    def __init__(self, encoder: Any, tokenizer: Any, head: Any, facts: Facts, device: str = "cpu") -> None:
        self._encoder, self._head = encoder.to(device).eval(), head.to(device).eval()
        self._tokenizer, self._device, self.facts = tokenizer, device, facts
        self.curve = Curve(np.array(facts.edges), facts.longest)

    @classmethod
    def load(cls, directory: Path, device: str = "") -> Proxy:
        """The model that `train` wrote to a directory. Raises ConfigError when there is none."""
        try:
            facts = msgspec.json.decode((directory / "proxy.json").read_bytes(), type=Facts)
            encoder, tokenizer = _encoder(directory)
            head = _head(encoder, len(facts.edges) + 1)
            head.load_state_dict(load_file(directory / "head.safetensors"))
        except (OSError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
            raise ConfigError(f"--predictor-proxy: {directory}: {error}") from None
        return cls(encoder, tokenizer, head, facts, device or _best_device())

    def save(self, directory: Path) -> None:
        """Write what `load` reads."""
        directory.mkdir(parents=True, exist_ok=True)
        self._encoder.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)
        save_file({name: value.contiguous() for name, value in self._head.state_dict().items()}, directory / "head.safetensors")
        (directory / "proxy.json").write_bytes(msgspec.json.encode(self.facts))

    @torch.inference_mode()
    def above(self, texts: Sequence[str]) -> np.ndarray:
        """P(length > edge) of answers to these texts, (n, K) float64."""
        logits = _logits(self._encoder, self._head, _tokens(self._tokenizer, texts), self._device)
        shares = logits.softmax(1).double().cpu().numpy()
        return 1.0 - np.cumsum(shares, axis=1)[:, :-1]


def train(
    examples: Sequence[Example],
    encoder_dir: Path,
    *,
    epochs: int = 4,
    seed: int = 0,
    device: str = "",
    progress: Callable[[int, int], None] = lambda done, steps: None,
) -> Proxy:
    """Fine-tune the encoder in `encoder_dir` on finished requests; deterministic for a seed on one kind of device.

    `progress(done, steps)` is called after every step. Raises ConfigError when there is too little to learn from.
    """
    device = device or _best_device()
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    order = draw.permutation(len(examples))
    held, used = np.split(order, [round(len(order) * HELD_OUT)])
    lengths = np.array([one.tokens for one in examples])
    edges = np.unique(np.quantile(lengths[used], np.arange(1, CLASSES) / CLASSES, method="lower")) if len(used) else lengths
    edges = edges[edges < lengths.max(initial=0)]
    if len(used) < BATCH or not len(edges):
        raise ConfigError(f"{len(examples)} requests are too few, or all of one length, to train on")
    encoder, tokenizer = _encoder(encoder_dir)
    encoder, head = encoder.to(device).train(), _head(encoder, len(edges) + 1).to(device).train()
    encoder.get_input_embeddings().requires_grad_(False)  # words that no prompt had keep their meaning, and steps are cheaper
    tokens = _tokens(tokenizer, [one.text for one in examples])
    distance = np.abs(np.searchsorted(edges, lengths)[:, None] - np.arange(len(edges) + 1))
    targets = torch.tensor(np.exp(-distance / SMOOTHING), dtype=torch.float32, device=device)
    targets /= targets.sum(1, keepdim=True)
    body = [value for value in encoder.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": body, "lr": LEARNING_RATE}, {"params": list(head.parameters()), "lr": HEAD_RATE}], weight_decay=0.01
    )
    steps = epochs * -(-len(used) // BATCH)
    warm_up = max(1, round(steps * WARM_UP))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, max(0.0, (steps - step) / max(1, steps - warm_up)))
    )
    done = 0
    for _ in range(epochs):
        for batch in _batches(draw.permutation(used), tokens, draw):
            logits = _logits(encoder, head, [tokens[i] for i in batch], device)
            loss = -(targets[batch] * logits.log_softmax(1)).sum(1).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([*body, *head.parameters()], 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            progress(done, steps)
    facts = Facts(edges=edges.astype(float).tolist(), longest=float(lengths.max()), levels=[], trained_on=len(used))
    proxy = Proxy(encoder, tokenizer, head, facts, device)
    levels: list[float] = []
    for at in range(0, len(held), BATCH):
        some = held[at : at + BATCH]
        rows = proxy.above([examples[i].text for i in some])
        levels += [proxy.curve.level(row, int(lengths[i])) for row, i in zip(rows, some, strict=True)]
    proxy.facts = msgspec.structs.replace(facts, levels=levels)
    return proxy


def _encoder(directory: Path) -> tuple[Any, Any]:
    """Raises ConfigError when the directory holds no encoder; never downloads."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is no local Hugging Face model: it has no config.json")
    try:
        encoder = AutoModel.from_pretrained(directory, local_files_only=True, dtype=torch.float32)
        return encoder, AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: {error}") from None


def _head(encoder: Any, classes: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(2 * encoder.config.hidden_size, classes))


def _tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(
        [excerpt(text) for text in texts], truncation=True, max_length=TEXT_TOKENS, return_attention_mask=False
    )["input_ids"]
    return [ids or [tokenizer.pad_token_id or 0] for ids in found]


def _logits(encoder: Any, head: Any, tokens: Sequence[Sequence[int]], device: str) -> torch.Tensor:
    """(n, classes) from n lists of token ids."""
    longest = max(map(len, tokens))
    ids = torch.zeros(len(tokens), longest, dtype=torch.long)
    mask = torch.zeros(len(tokens), longest, dtype=torch.long)
    for row, one in enumerate(tokens):
        ids[row, : len(one)] = torch.tensor(one)
        mask[row, : len(one)] = 1
    states = encoder(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
    share = mask.to(device)[..., None] / mask.sum(1).to(device)[:, None, None]
    logits: torch.Tensor = head(torch.cat(((states * share).sum(1), states[:, 0]), 1))
    return logits


def _batches(order: np.ndarray, tokens: Sequence[Sequence[int]], draw: np.random.Generator) -> list[np.ndarray]:
    """The requests in batches of prompts that are about as long."""
    found: list[np.ndarray] = []
    for at in range(0, len(order), BATCH * BUCKET):
        some = sorted(order[at : at + BATCH * BUCKET], key=lambda i: len(tokens[i]))
        found += [np.array(some[i : i + BATCH]) for i in range(0, len(some), BATCH)]
    return [found[i] for i in draw.permutation(len(found))]


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
