"""The error for a request that no worker takes.

no live worker serves the base model      -> Unavailable (503)   a worker must be started
none has a capability that it needs       -> BadRequest (400)    with the field that asks for it; Unavailable (503) for one that
                                                                 had begun, or while a worker that has it is silent
none can change its adapter's layers      -> likewise, with the layer
some are full                             -> Overloaded (429)    with the time until one has room
none would meet its objectives            -> Overloaded (429)    with the time until one would (`too_late`)
the rest are draining or did not answer   -> Unavailable (503)   another worker may serve it soon
every live one is too small for it        -> BadRequest (400)    with the request's size and the limit
"""

from __future__ import annotations

from motet.policies.cluster.candidates import PERMANENT, Ask, Screening
from motet.shared.errors import BadRequest, MotetError, Overloaded, PromptTooLong, Unavailable
from motet.shared.model import SLO_MAX_MS, Capability

MEANINGS: dict[str, str] = {
    "structured": "structured outputs",
    "resumes_structured": "structured outputs from their middle on",
    "prompt_logprobs": "log-probabilities of prompts",
    "embeddings": "embeddings",
    "images": "images",
    "draws": "pictures",
}
"""Descriptions of the capabilities for error messages."""
ONLY: dict[Capability, str] = {
    "embeddings": "have a pooling model, which makes embeddings and no text",
    "draws": "have a model that draws images and makes no text",
}
RETRY_S = 1.0
"""Retry-After for clients while no worker is there."""


def refusal(ask: Ask, screening: Screening, room_in_s: float) -> MotetError:
    """The error for a request without candidates. `room_in_s`: when a full worker is likely to have room."""
    rejected = screening.rejected
    live = sum(count for reason, count in rejected.items() if reason not in ("stale", "capability", "lora_layers"))
    if not live and "lora_layers" in rejected:
        return _unchangeable(ask, screening)
    if not live and "capability" in rejected:
        return _incapable(ask, screening)
    if not live:
        silent = f" ({rejected['stale']} went silent)" if "stale" in rejected else ""
        return Unavailable(f"no worker serves base model {ask.base_model}{silent}", param="model", retry_after_s=RETRY_S)
    if "full" in rejected:
        return Overloaded(
            f"all {live} workers of {ask.base_model} are full; room is likely in {room_in_s:.1f} s", retry_after_s=room_in_s
        )
    if rejected.keys() - PERMANENT - {"stale"}:
        away = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
        return Unavailable(f"no worker of {ask.base_model} takes requests now: {away}", retry_after_s=RETRY_S)
    if "lora_rank" in rejected and not screening.largest_rank:
        return BadRequest(f"the workers of {ask.base_model} run it without adapters", param="model")
    if "lora_rank" in rejected:
        return BadRequest(
            f"the adapter's rank {ask.rank_needed} is above {screening.largest_rank}, the largest a worker of {ask.base_model} "
            "takes (--max-lora-rank of the workers)",
            param="model",
        )
    return PromptTooLong.of(
        screening.longest_context,
        f"your prompt resulted in {ask.tokens} tokens, and an answer needs at least one more.",
        param="prompt",
    )


def _incapable(ask: Ask, screening: Screening) -> MotetError:
    """The error when no live worker has the capabilities that the request needs."""
    if not ask.needs:
        what = " or ".join(ONLY[word] for word in screening.exclusive or ("embeddings",))
        reason = f"model: the workers of {ask.base_model} {what}"
        if ask.begun or "stale" in screening.rejected:
            return Unavailable(reason, param="model", retry_after_s=RETRY_S)
        return BadRequest(reason, param="model")
    lacking = screening.lacking or tuple(ask.needs)  # each is there, but on different workers
    wanted = " and ".join(MEANINGS.get(word, word) for word in lacking)
    field = ask.needs[lacking[0]]
    reason = f"{field}: no worker of {ask.base_model} serves {wanted}"
    if ask.begun or "stale" in screening.rejected:
        return Unavailable(f"{reason} now", param=field, retry_after_s=RETRY_S)
    return BadRequest(reason, param=field)


def _unchangeable(ask: Ask, screening: Screening) -> MotetError:
    """The error when no live worker can change the layers of the request's adapter."""
    layer = (screening.lacking_layers or ask.targets)[0]  # or each is there, but on different workers
    reason = (
        f"model: no worker of {ask.base_model} can run this adapter: its engine would have to change {layer}, as vLLM does "
        "where it serves such adapters"
    )
    if ask.begun or "stale" in screening.rejected:
        return Unavailable(f"{reason}; none does now", param="model", retry_after_s=RETRY_S)
    return BadRequest(reason, param="model")


def too_late(ask: Ask, late_s: float) -> Overloaded:
    """The error for a request that every candidate would serve too late. `late_s`: time until one is expected to be in time."""
    one = "step" if ask.draws else "token"
    objectives = (
        (ask.ttft_slo_ms, f"to the first {one}"),
        (ask.tpot_slo_ms, f"per {one}"),
        (ask.e2e_slo_ms, "for the whole answer"),
    )
    told = [f"{objective_ms:g} ms {what}" for objective_ms, what in objectives if objective_ms < SLO_MAX_MS]
    meet = " and ".join(told) or "all objectives"
    return Overloaded(
        f"no worker of {ask.base_model} is expected to have room and to meet {meet} now; one probably will in {late_s:.1f} s",
        retry_after_s=late_s,
    )
