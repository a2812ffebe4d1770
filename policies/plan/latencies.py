"""Latencies that a share of a worker's requests stays below, from the steps at its usual batch.

A request's TPOT is the mean of the steps that it is part of. It varies with the prompts in these steps, the less the more
output tokens there are, and with the batch, which changes more slowly than a request ends. A prompt waits in a queue of
prompts, served as fast as steps full of prompt tokens allow (Pollaczek and Khinchine's mean, an exponential tail), and then is
computed itself. Where prompts take the share p of the worker's time, a long step also brings more prompts to the next:
1 / (1 - p).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.policies.plan.demand import Floats
from motet.policies.plan.loads import Loads

SHARES = (0.5, 1.0 - 1e-6)
"""Shares of requests for which latencies are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Steps at a worker's usual batch, [settings]."""

    batch: Floats
    step_ms: Floats  # mean
    decode_ms: Floats  # of one without prompts
    mixed_ms: Floats  # of one with prompts
    with_prompts: Floats  # share of steps that have some
    begin: Floats  # how many these have
    row_ms: Floats  # what one more request adds to a step
    stiffness: Floats  # 1 less the elasticity of step times to the batch
    prompt_token_ms: Floats  # time per prompt token in steps that are full of them


def most_of(mean: Floats, deviation: Floats, z: float | Floats, unit: Floats | float = 1.0) -> Floats:
    """What a number of things that come by chance rarely exceeds: `z` standard deviations more than the mean, a third moment as
    that of a Poisson distribution (Cornish and Fisher), and half of one, since numbers are whole. `unit`: the size of one.
    """
    return mean + z * deviation + unit * (np.maximum(np.square(z) - 1.0, 0.0) / 6.0 + 0.5)


def wait_ms(mean: Floats, deviation: Floats, most: Floats, stay_ms: Floats, share: Floats) -> Floats:
    """What the wait for one of `most` servers stays below for this share of the arrivals; inf where they are too few.

    Halfin and Whitt's approximation for many servers, of which `mean` are busy on average, for `stay_ms` each.
    """
    from scipy.special import ndtr

    free = np.maximum(most - mean, 0.0)
    z = np.minimum(free / np.maximum(deviation, 1e-9), 30.0)
    some = 1.0 / (1.0 + z * np.exp(z * z / 2.0) * np.sqrt(2.0 * np.pi) * ndtr(z))
    waits = np.minimum(stay_ms, 1e12) / np.maximum(free, 1e-9) * np.log(np.maximum(some / (1.0 - share), 1.0))
    return np.where(free > 0, waits, np.inf)


def deviations(share: Floats | float) -> Floats:
    """How many standard deviations above the mean a share of a normal distribution stays below."""
    from scipy.special import ndtri

    return np.asarray(ndtri(share))


def latencies(usual: Usual, deviation: Floats, loads: Loads, waits_ms: Floats) -> tuple[Floats, Floats]:
    """(TPOT, TTFT) in ms that the required share of requests stays below, [settings].

    `deviation`: of the batch; `waits_ms`: what a request waits for besides.
    """
    share = np.clip(loads.extreme("share"), *SHARES)
    tail = deviations(share)
    prompt, square, rate_ms = loads.mean("prompt"), loads.mean("prompt_square"), loads.rate / 1e3
    service_ms = prompt * usual.prompt_token_ms
    taken = np.minimum(rate_ms * service_ms, 0.99)

    prompts_ms = (usual.mixed_ms - usual.decode_ms) / prompt * np.sqrt(square / usual.begin) / (1.0 - taken)
    wave_ms = usual.row_ms * deviation
    tpot_ms = usual.step_ms + tail * np.sqrt(usual.with_prompts * prompts_ms**2 * loads.mean("inverse") + wave_ms**2)

    decay_ms = square / prompt * usual.prompt_token_ms / (2.0 * (1.0 - taken))  # mean wait of those who wait
    wait_ms = decay_ms * np.log(np.maximum(taken / (1.0 - share), 1.0))
    own_ms = loads.mean("prompt_p99") * usual.prompt_token_ms
    return tpot_ms, usual.step_ms + np.maximum(own_ms, usual.mixed_ms) + wait_ms + tail * wave_ms + waits_ms
