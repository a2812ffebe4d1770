"""Checks a request when it arrives at the worker, and makes the engine's of it; an error names the field and the reason.

The gateway checks its users' input before. Inside a worker this is the only check: core and engine rely on it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from motet.policies.memory.kv_blocks import cache_scope
from motet.services.worker.engines.image_limits import ImageLimits
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.image_admission import check_adapters, check_image
from motet.shared.errors import BadRequest, ModelNotFound, PromptTooLong
from motet.shared.model import IMAGES_MAX, TOKEN_BYTES, ImageParams, SamplingParams
from motet.shared.wire.request import GenerateRequest, token_array


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptable:
    """Limits and abilities of this worker's model; lengths in tokens."""

    base_model: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    max_lora_rank: int
    serves: frozenset[str] = frozenset()
    """The engine's capabilities."""
    share_prefix_cache: bool = False
    """Tenants share KV blocks of prompts for the base model."""
    image: ImageLimits | None = None
    """Of an engine that draws."""


def admit(request: GenerateRequest, acceptable: Acceptable, arrival_s: float) -> EngineRequest:
    """The request as the engine gets it; the weights of its adapter come later. Raises what `check` raises."""
    check(request, acceptable)
    shared = acceptable.share_prefix_cache and request.adapter is None
    scope = cache_scope(request.tenant, request.cache_salt, shared=shared)
    return EngineRequest.of(request, arrival_s=arrival_s, cache_scope=scope)


def check(request: GenerateRequest, acceptable: Acceptable) -> None:
    """Raises ModelNotFound, BadRequest or PromptTooLong."""
    if request.base_model != acceptable.base_model:
        raise ModelNotFound(f"this worker serves {acceptable.base_model!r}, not {request.base_model!r}", param="model")
    for word, field in request.needs.items():
        if word not in acceptable.serves:
            raise BadRequest(f"{field}: this worker's engine has no {word!r}", param=field)
    embeds = request.embedding is not None
    if embeds != ("embeddings" in acceptable.serves):
        made = "text, no embeddings" if embeds else "embeddings, no text"
        raise BadRequest(f"model: this worker's model makes {made}", param="model")
    if (request.image is not None) != ("draws" in acceptable.serves):
        made = "text, no pictures" if request.image is not None else "pictures, no text"
        raise BadRequest(f"model: this worker's model makes {made}", param="model")
    if request.image is not None:
        _check_picture(request, request.image, acceptable)
    else:
        _check_text(request, acceptable, embeds=embeds)


def _check_text(request: GenerateRequest, acceptable: Acceptable, *, embeds: bool) -> None:
    if request.adapters:
        raise BadRequest("adapters: this worker takes one adapter per request", param="adapters")
    if request.images and "images" not in acceptable.serves:
        at = request.images[0].param
        raise BadRequest(f"{at}: this worker's model takes no images", param=at)
    if len(request.images) > IMAGES_MAX:
        raise BadRequest(f"a request may have {IMAGES_MAX} images", param="images")
    _check_tokens(request.prompt, "prompt", acceptable.vocab_size)
    _check_tokens(request.output, "output", acceptable.vocab_size)
    prompt, output = request.prompt_tokens, request.output_tokens
    _check_sampling(request.sampling, acceptable)
    if not prompt:
        raise BadRequest("the prompt has no tokens", param="prompt")
    longest = acceptable.max_model_len
    if embeds:
        if prompt > longest:
            raise PromptTooLong.of(longest, f"your input resulted in {prompt} tokens.", param="input")
    elif prompt >= longest:
        raise PromptTooLong.of(
            longest, f"your prompt resulted in {prompt} tokens, and an answer needs at least one more.", param="prompt"
        )
    if prompt + output > longest:
        raise PromptTooLong.of(
            longest, f"there are {prompt} prompt tokens and {output} tokens of output so far.", param="output"
        )
    adapter = request.adapter
    if adapter is not None and not acceptable.max_lora_rank:
        raise BadRequest(f"this worker runs {acceptable.base_model} without adapters", param="model")
    if adapter is not None and not 1 <= adapter.rank <= acceptable.max_lora_rank:
        raise BadRequest(
            f"adapter {adapter.name!r} has rank {adapter.rank}; this worker takes ranks 1 to {acceptable.max_lora_rank}",
            param="model",
        )


def _check_picture(request: GenerateRequest, image: ImageParams, acceptable: Acceptable) -> None:
    assert acceptable.image is not None, "an engine that draws has told its limits"
    for field, data in (
        ("prompt", request.prompt),
        ("negative_prompt", image.negative),
        ("prompt_2", image.prompt_2),
        ("negative_2", image.negative_2),
    ):
        _check_tokens(data, field, acceptable.vocab_size)
        if len(data) // TOKEN_BYTES > acceptable.max_model_len - acceptable.image.steps_max:
            raise BadRequest(f"{field}: {len(data) // TOKEN_BYTES} tokens are too many", param=field)
    if not request.prompt:
        raise BadRequest("the prompt has no tokens", param="prompt")
    check_image(request, image, acceptable.image)
    if request.weighted and not acceptable.max_lora_rank:
        raise BadRequest(f"this worker runs {acceptable.base_model} without adapters", param="model")
    check_adapters(request, acceptable.max_lora_rank)


def _check_tokens(data: bytes, field: str, vocab_size: int) -> None:
    if len(data) % TOKEN_BYTES:
        raise BadRequest(f"{field} is {len(data)} bytes: token ids are four bytes each", param=field)
    _check_ids(token_array(data), field, vocab_size)


def _check_ids(tokens: Collection[int], field: str, vocab_size: int) -> None:
    """Raise for a token id outside the embedding, which would fail the whole batch."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise BadRequest(f"{field} has token ids outside [0, {vocab_size})", param=field)


def _check_sampling(sampling: SamplingParams, acceptable: Acceptable) -> None:
    allowed, bad_words = sampling.allowed_token_ids, sampling.bad_words
    _check_ids(sampling.logit_bias, "logit_bias", acceptable.vocab_size)
    _check_ids(allowed, "allowed_token_ids", acceptable.vocab_size)
    _check_ids([token for word in bad_words for token in word], "bad_words", acceptable.vocab_size)
    if not allowed:
        return
    banned = {word[0] for word in bad_words if len(word) == 1}
    if sampling.min_tokens:
        banned.update(sampling.stop_token_ids, () if sampling.ignore_eos else acceptable.eos_token_ids)
    if banned.issuperset(allowed):
        raise BadRequest("allowed_token_ids leaves no token to draw", param="allowed_token_ids")
