"""The predictor's configuration."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from motet.shared.config import ServiceConfig


class PredictorConfig(ServiceConfig, frozen=True, kw_only=True):
    """How many adapters the predictor learns lengths for."""

    max_histograms: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum adapters with their own length histogram (1.5 KiB each); the least recently used is evicted",
        ),
    ] = 20_000
