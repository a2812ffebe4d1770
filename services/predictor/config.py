"""The predictor's configuration."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.config import ServiceConfig


class PredictorConfig(ServiceConfig, frozen=True, kw_only=True):
    """How much to remember."""

    max_adapters: Annotated[
        int, Meta(ge=1, description="adapters with a length histogram of their own (1.5 KiB each); the idlest is forgotten")
    ] = 20_000
