"""Describes a request to those that decide: the same words for live and for simulated services.

Work ──brief_of──> RequestBrief    what schedulers and workers tell each other about it
                        │
                        └──ask_of──> Ask    the question which worker takes it
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Protocol

from msgspec.structs import replace

from motet.policies.cluster.candidates import Ask
from motet.policies.cluster.demand import Standing
from motet.policies.cluster.worker_load import tokens_left
from motet.policies.cluster.worker_table import hash_of
from motet.shared.model import AdapterRef, ImageParams, Phase, PictureBrief, RequestBrief, Slo, Weighted
from motet.shared.wire.prefixes import PrefixKeys

RESUMED_TTFT_MS = 300.0
"""Objective for the next token of a request that lost its worker or moves: its reader is in mid-sentence."""


class Described(Protocol):
    """What is told of a request: `shared.wire.request.Work` has it, and a simulated request. `adapter`: None for the base."""

    @property
    def request_id(self) -> str: ...
    @property
    def adapter(self) -> AdapterRef | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def slo(self) -> Slo: ...
    @property
    def tenant(self) -> str: ...
    @property
    def tenant_weight(self) -> float: ...


def brief_of(
    work: Described,
    *,
    predicted_tokens: int,
    epoch: int = 0,
    output_tokens: int = 0,
    phase: Phase = "waiting",
    cached_tokens: int = 0,
) -> RequestBrief:
    """The facts of a request. `output_tokens`: so far; `predicted_tokens`: of the whole output; `cached_tokens`: of the prompt,
    expected in its worker's prefix cache."""
    adapter, slo = work.adapter, work.slo
    return RequestBrief(
        work.request_id,
        epoch,
        adapter.digest if adapter is not None else "",
        adapter.rank if adapter is not None else 0,
        work.prompt_tokens,
        output_tokens,
        predicted_tokens,
        phase,
        slo.tpot_slo_ms,
        slo.ttft_slo_ms,
        work.tenant,
        work.tenant_weight,
        cached_tokens,
    )


def picture_brief(brief: RequestBrief, image: ImageParams, weighted: tuple[Weighted, ...]) -> RequestBrief:
    """The brief of a request for a picture, which has several adapters and adds as much to a step as its pixels do."""
    digests = [one.ref.digest for one in weighted] or [""]
    rank = sum(one.ref.rank for one in weighted)
    picture = PictureBrief(image.rows, tuple(digests[1:]), image.area)
    return replace(brief, rank=rank, adapter_digest=digests[0], picture=picture)


def first_and_more(weighted: tuple[Weighted, ...]) -> tuple[AdapterRef | None, tuple[AdapterRef, ...]]:
    """The first of a request's adapters, None without one, and the others."""
    refs = tuple(one.ref for one in weighted)
    return (refs[0], refs[1:]) if refs else (None, ())


def ask_of(
    brief: RequestBrief,
    standing: Standing,
    *,
    base_model: str,
    adapter_bytes: int = 0,
    more: tuple[AdapterRef, ...] = (),
    largest_rank: int = 0,
    e2e_slo_ms: float = 0.0,
    prefix_keys: tuple[PrefixKeys, ...] = (),
    travels: bool = False,
    needs: Mapping[str, str] = {},
    targets: tuple[str, ...] = (),
    avoid: tuple[str, ...] = (),
    tried: tuple[str, ...] = (),
) -> Ask:
    """The question which worker takes the request. `standing`: of its tenant; `more`: its adapters after the first;
    `e2e_slo_ms`: 0 for none; the others as in `Ask`."""
    begun = brief.epoch > 0 or brief.output_tokens > 0
    return Ask(
        base_model=base_model,
        rank=brief.rank,
        tokens=brief.prompt_tokens + brief.output_tokens,
        tpot_slo_ms=brief.tpot_slo_ms,
        ttft_slo_ms=min(brief.ttft_slo_ms, RESUMED_TTFT_MS) if begun else brief.ttft_slo_ms,
        out_tokens=tokens_left(brief),
        adapter=brief.adapter_digest,
        adapter_bytes=adapter_bytes,
        key=hash_of(brief.request_id),
        prefix_keys=prefix_keys,
        travels=travels,
        avoid=avoid,
        tried=tried,
        needs=needs,
        targets=targets,
        begun=begun,
        tenant=brief.tenant,
        tenant_weight=brief.tenant_weight,
        demand=standing.own,
        largest_demand=standing.largest,
        rows=brief.rows,
        area=brief.picture.area if brief.picture is not None else 0.0,
        more=tuple([(one.digest, one.size_bytes) for one in more]) if more else (),
        largest_rank=largest_rank,
        e2e_slo_ms=e2e_slo_ms or inf,
    )


def predicted(expected_tokens: int, *, most: int, produced: int) -> int:
    """The length of an output, of which `produced` tokens are there, from the expected length of such outputs."""
    return min(most, max(expected_tokens, produced + 1))
