"""Counts ended streams, by labels of bounded cardinality.

Tenants choose adapter names, so the `adapter` label is bounded: it keeps the first `ADAPTERS_MAX` names and calls all others
"other". The base model is "base". The `tenant` label is bounded in the same way.
"""

from __future__ import annotations

from motet.services.gateway import metrics
from motet.services.gateway.owner.drawing import Drawing
from motet.services.gateway.owner.stream import Stream
from motet.shared.clock import now_s

ADAPTERS_MAX = TENANTS_MAX = 100

adapters_met: set[str] = set()
tenants_met: set[str] = set()


def adapter_label(stream: Stream) -> str:
    """The stream's adapter, the first of several, as a label of bounded cardinality."""
    weighted = stream.job.weighted
    if not weighted:
        return "base"
    return _bounded(weighted[0].ref.name, adapters_met, ADAPTERS_MAX)


def tenant_label(stream: Stream) -> str:
    """The stream's tenant as a label of bounded cardinality."""
    return _bounded(stream.job.tenant, tenants_met, TENANTS_MAX)


def _bounded(value: str, met: set[str], limit: int) -> str:
    """`value`, or "other" when it would be one too many."""
    if value not in met:
        if len(met) >= limit:
            return "other"
        met.add(value)
    return value


def observe(stream: Stream, outcome: str) -> None:
    """Record an ended stream."""
    now, tokens, slo = now_s(), len(stream.tokens), stream.job.slo
    labels = (adapter_label(stream), slo.slo_class)
    metrics.REQUESTS.labels(*labels, outcome).inc()
    if stream.drawing is not None:
        _observe_picture(stream, stream.drawing, outcome)
    tenant = tenant_label(stream)
    metrics.TENANT_REQUESTS.labels(tenant, outcome).inc()
    for kind, count in (("prompt", stream.job.prompt_tokens), ("cached", stream.cached_tokens), ("output", tokens)):
        metrics.TOKENS.labels(*labels, kind).inc(count)
        metrics.TENANT_TOKENS.labels(tenant, kind).inc(count)
    if not stream.first_s:
        return
    ttft_s = stream.first_s - stream.begun_s
    metrics.TTFT_S.labels(*labels).observe(ttft_s)
    metrics.QUEUE_S.labels(*labels).observe(stream.queue_ms / 1000)
    metrics.SLO_REQUESTS.labels(slo.slo_class, "ttft", _yes(ttft_s * 1000 <= slo.ttft_slo_ms)).inc()
    if stream.finish in ("stop", "length"):
        metrics.E2E_S.labels(*labels).observe(now - stream.begun_s)
        if tokens > 1:
            tpot_s = (now - stream.first_s) / (tokens - 1)
            metrics.TPOT_S.labels(*labels).observe(tpot_s)
            metrics.SLO_REQUESTS.labels(slo.slo_class, "tpot", _yes(tpot_s * 1000 <= slo.tpot_slo_ms)).inc()
        if slo.e2e_slo_ms:
            met = _yes((now - stream.begun_s) * 1000 <= slo.e2e_slo_ms)
            metrics.SLO_REQUESTS.labels(slo.slo_class, "e2e", met).inc()


def _observe_picture(stream: Stream, drawing: Drawing, outcome: str) -> None:
    """Record an ended picture: how it ended, and how long its parts took if it was drawn."""
    image = stream.job.image
    assert image is not None, "a picture was asked for"
    metrics.PICTURES.labels(image.kind, outcome).inc()
    if drawing.drawn_s and stream.first_s:
        stepped_s = max(stream.first_s, drawing.stepped_s)
        metrics.IMAGE_S.labels("queue").observe(stream.first_s - stream.begun_s)
        metrics.IMAGE_S.labels("denoise").observe(stepped_s - stream.first_s)
        metrics.IMAGE_S.labels("decode").observe(drawing.drawn_s - stepped_s)


def _yes(met: bool) -> str:
    return "yes" if met else "no"
