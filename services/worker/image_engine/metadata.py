"""What is written into a picture's file when the request asks for it: prompt, seed, steps, adapters."""

from __future__ import annotations

from motet.services.worker.engines.request import EngineRequest
from motet.shared.clip_tokenizer import ClipTokenizer
from motet.shared.wire.request import unpack_tokens

WORD_END = "</w>"


def describe(request: EngineRequest, tokenizer: ClipTokenizer) -> dict[str, str]:
    """{name: text} for the file of a request's picture. The tokenizer has prompts in lower case."""
    image = request.image
    assert image is not None, "a picture is described"
    adapters = ", ".join(f"{one.ref.name} {one.ref.digest} {one.weight:g}" for one in request.weighted)
    told = {
        "prompt": _text(tokenizer, request.prompt),
        "negative_prompt": _text(tokenizer, image.negative),
        "seed": str(request.sampling.seed),
        "steps": str(image.steps),
        "sampler": image.sampler,
        "guidance_scale": f"{image.guidance:g}",
        "adapters": adapters,
    }
    return {name: value for name, value in told.items() if value}


def _text(tokenizer: ClipTokenizer, tokens: bytes) -> str:
    """The text of a prompt, without the tokens around it."""
    decoded: str = tokenizer.backend.decode(unpack_tokens(tokens), skip_special_tokens=True)
    return decoded.replace(WORD_END, " ").strip()
