"""Output lengths: scheduler -> predictor, and the true lengths: gateway -> predictor."""

from __future__ import annotations

import msgspec

from motet.shared.wire.refusal import Refused


class PredictRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Asks for the output length of a request. An answer that takes longer than some milliseconds is not used."""

    adapter_digest: str  # "" for the base
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0  # as many as max_tokens when the end-of-sequence token is ignored
    features: bytes = b""  # policies.lengths.features, packed
    prompt_text: str = ""


class Prediction(msgspec.Struct, tag="prediction", kw_only=True):
    """Quantiles of the output length in tokens, clipped to max_tokens, from `samples` samples."""

    p50_tokens: int
    p90_tokens: int
    samples: int


class Outcome(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The true output length of a finished request, from its owner. Cancelled requests are not reported."""

    adapter_digest: str
    prompt_tokens: int
    output_tokens: int
    features: bytes = b""  # policies.lengths.features, packed


PredictReply = Prediction | Refused
