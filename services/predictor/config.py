"""The predictor's configuration."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from motet.shared.config import EXPERT, ServiceConfig


class PredictorConfig(ServiceConfig, frozen=True, kw_only=True):
    """It predicts how many tokens a request will produce, from its prompt and from finished requests."""

    max_histograms: Annotated[
        int,
        Meta(
            ge=1,
            description="maximum adapters with their own length histogram (1.5 KiB each); the least recently used is evicted",
            extra=EXPERT,
        ),
    ] = 20_000
    predictor_window: Annotated[
        int,
        Meta(
            ge=64,
            le=65_536,
            description="number of most recent finished requests that the prompt model is fitted to (about 200 bytes each)",
        ),
    ] = 8192
    predictor_fit_s: Annotated[
        float, Meta(gt=0, description="minimum seconds between two fits of the prompt model; a fit takes about a second")
    ] = 60.0
    predictor_proxy: Annotated[
        str,
        Meta(
            description="directory of a proxy model that reads prompts (`motet predictor train`); gateways need --send-prompts,"
            " and schedulers a --predict-ms that is long enough for it"
        ),
    ] = ""
    predictor_state: Annotated[
        bool, Meta(description="keep what was learned in the object store `motet_predictor`, for restarts and other copies")
    ] = True
