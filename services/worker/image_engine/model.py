"""The forward passes of an image model: text encoders, UNet, and both halves of the VAE, for rows of any requests.

Rows of one call have equal shapes. Which adapters they have is said before with `Sites.use`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from motet.services.worker.image_engine.checkpoint import SCORE_IDS, Checkpoint
from motet.shared.clip_tokenizer import PART_TOKENS
from motet.shared.image_shapes import TEXT_ENCODERS

SCORE, SCORE_NEGATIVE = 6.0, 2.5
"""The aesthetic scores that a refiner is asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One text in token ids, for every text encoder: as many parts for each."""

    parts: Mapping[str, torch.Tensor]  # int64 [parts, PART_TOKENS] by text encoder


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """An encoded prompt."""

    text: torch.Tensor  # [tokens, features]
    pooled: torch.Tensor | None  # [features], of SDXL

    @property
    def tokens(self) -> int:
        return len(self.text)


class ImageModel:
    """The models of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        config = checkpoint.vae.config
        self._scale = float(config.scaling_factor)
        mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        has_both = checkpoint.xl and mean is not None and deviation is not None
        self._mean = torch.tensor(mean if has_both else [0.0] * 4).view(1, 4, 1, 1)
        self._deviation = torch.tensor(deviation if has_both else [1.0] * 4).view(1, 4, 1, 1)

    def prompt(self, tokens: list[int], second: list[int], parts: int = 1) -> Prompt:
        """A prompt of whole parts for all text encoders. `second`: the tokens for a second one, if they differ.

        It gets `parts` parts; those beyond the text are empty prompts.
        """
        found = {}
        for part, tokenizer in self.checkpoint.tokenizers.items():
            own = second if part == TEXT_ENCODERS[1] and second else tokens
            missing = max(0, parts - len(own) // PART_TOKENS)
            found[part] = torch.tensor(own + tokenizer.parts([], missing)).view(-1, PART_TOKENS)
        return Prompt(found)

    def empty(self, parts: int) -> Prompt:
        """The prompt without words."""
        return self.prompt([], [], parts)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[Prompt]) -> list[Encoding]:
        """Encode prompts; the rows of `Sites.use` are their parts, one after another."""
        counts = [len(next(iter(prompt.parts.values()))) for prompt in prompts]
        texts, pooled = [], None
        for part, encoder in self.checkpoint.encoders.items():
            ids = torch.cat([prompt.parts[part] for prompt in prompts])
            if self.checkpoint.xl:
                out = encoder(ids, output_hidden_states=True)
                texts.append(out.hidden_states[-2])
                pooled = out.text_embeds if part == TEXT_ENCODERS[1] else pooled
            else:
                texts.append(encoder(ids).last_hidden_state)
        features = torch.cat(texts, dim=-1)
        found, at = [], 0
        for count in counts:
            rows = features[at : at + count]
            first = pooled[at] if pooled is not None else None  # of the first part, which has the beginning of the text
            found.append(Encoding(rows.reshape(-1, rows.shape[-1]), first))
            at += count
        return found

    def nothing(self, like: Encoding) -> Encoding:
        """The encoding that stands for a missing negative prompt where that is zero."""
        return Encoding(torch.zeros_like(like.text), None if like.pooled is None else torch.zeros_like(like.pooled))

    def time_ids(self, width: int, height: int, *, negative: bool) -> torch.Tensor | None:
        """The numbers beside the time step, [5 or 6]; None for a model without."""
        if not self.checkpoint.time_ids:
            return None
        sizes = [height, width, 0, 0]
        last = [SCORE_NEGATIVE if negative else SCORE] if self.checkpoint.time_ids == SCORE_IDS else [height, width]
        return torch.tensor([*sizes, *last], dtype=torch.float32)

    @torch.inference_mode()
    def predict(
        self,
        latents: torch.Tensor,
        times: torch.Tensor,
        text: torch.Tensor,
        pooled: torch.Tensor | None = None,
        time_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The UNet's prediction [rows, 4, height, width].

        `latents`: [rows, channels of the base, height, width]; `times`: float32 [rows]; `text`: [rows, tokens, features];
        `pooled`, `time_ids`: [rows, ...], of SDXL.
        """
        added = None if pooled is None else {"text_embeds": pooled, "time_ids": time_ids}
        found: torch.Tensor = self.checkpoint.unet(
            latents, times, encoder_hidden_states=text, added_cond_kwargs=added, return_dict=False
        )[0]
        return found

    @torch.inference_mode()
    def to_latents(self, pixels: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Latents [n, 4, ...] of pictures [n, 3, height, width], drawn with `noise` [n, 4, ...] from what the VAE says."""
        found = self.checkpoint.vae.encode(pixels).latent_dist
        latents: torch.Tensor = found.mean + found.std * noise
        return (latents - self._mean) * self._scale / self._deviation

    @torch.inference_mode()
    def to_pictures(self, latents: torch.Tensor) -> torch.Tensor:
        """Pictures [n, 3, height, width] from -1 to 1 of latents [n, 4, ...]."""
        decoded: torch.Tensor = self.checkpoint.vae.decode(
            latents * self._deviation / self._scale + self._mean, return_dict=False
        )[0]
        return decoded
