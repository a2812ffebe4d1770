"""Laps: rounds of streams that all begin at once, and the times of their tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.rig.http import BASE, completion, post
from bench.rig.percentiles import quantile_ms
from bench.rig.requests import PATIENT, Request, play

LAP_S = 900.0


@dataclass(slots=True)
class Lap:
    """One round of concurrent streams: seconds from the start to the first and to the last token of each."""

    first_s: list[float]
    last_s: list[float]
    tokens: int  # per stream
    gaps_s: list[float] = field(default_factory=list)  # between the tokens of each stream, where the client looked at them

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all streams together."""
        return len(self.last_s) * self.tokens / max(self.last_s)

    @property
    def tpot_s(self) -> list[float]:
        """The mean time between the tokens of each stream."""
        return [(last - first) / (self.tokens - 1) for first, last in zip(self.first_s, self.last_s, strict=True)]


class Laps(list[Lap]):
    """Laps of the same kind. A latency is the quantile over all streams, or all gaps, of all laps."""

    @property
    def tokens_per_s(self) -> float:
        """The median over the laps."""
        return statistics.median(lap.tokens_per_s for lap in self)

    def ttft_ms(self, share: float) -> float:
        """Time to first token."""
        return quantile_ms((value for lap in self for value in lap.first_s), share)

    def tpot_ms(self, share: float) -> float:
        """Mean time between the tokens of a stream."""
        return quantile_ms((value for lap in self for value in lap.tpot_s), share)

    def itl_ms(self, share: float) -> float:
        """Time between two tokens."""
        return quantile_ms((value for lap in self for value in lap.gaps_s), share)


def lap_over_http(port: int, prompts: Sequence[Sequence[int]], max_tokens: int, models: Sequence[str] = (BASE,)) -> Lap:
    """Send all prompts at once, over connections that are open already, and read the streams.

    Prompt i asks for model i of `models`, which repeat. Raises RuntimeError when an answer is an error or is not `max_tokens`
    long.
    """
    requests = []
    for i, prompt in enumerate(prompts):
        body = completion(models[i % len(models)], prompt, max_tokens, seed=i, stream=True)
        body["stream_options"] = {"include_usage": True}
        requests.append(Request(wire=post(body, {"connection": "close", **PATIENT.objectives}), keep=True))
    play(port, requests, connected=True, patience_s=LAP_S)
    for one in requests:
        if f'"completion_tokens":{max_tokens}'.encode() not in one.data.replace(b": ", b":"):
            raise RuntimeError(f"not {max_tokens} tokens: {bytes(one.data[:600])!r} ... {bytes(one.data[-600:])!r}")
    gaps_s = [gap_s for one in requests for gap_s in one.gaps_s]
    return Lap([one.first_s for one in requests], [one.last_s for one in requests], max_tokens, gaps_s)
