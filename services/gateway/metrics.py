"""The gateway's metrics: `motet_*`, and the `vllm:*` names that Kubernetes inference gateways scrape.

Tenants choose adapter names, so the `adapter` label is bounded: it keeps the first `ADAPTERS_MAX` names and calls all others
"other". The base model is "base". The `tenant` label is bounded in the same way. The metrics of an adapter's location name the
same adapters, and pinned ones.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from motet.policies.cluster.worker_book import Holdings, Known
from motet.services.gateway.owner.fleet import Fleet
from motet.services.gateway.owner.stream import Stream
from motet.shared.clock import now_s, unix_ms
from motet.shared.messages import AdapterInfo
from motet.shared.telemetry import LATENCY_BUCKETS_S, REGISTRY
from motet.shared.tenancy import qualified

ADAPTERS_MAX = TENANTS_MAX = 100
LOADED_MAX = 1000  # adapters listed as loaded, those on devices first
LEVELS = {"device": "gpu", "host": "cpu"}  # vLLM's words for tiers, also where the device is a CPU
_LABELS = ["adapter", "slo_class"]

TTFT_S = Histogram(
    "motet_ttft_seconds",
    "Time from a request's arrival at the gateway to its first token.",
    _LABELS,
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
TPOT_S = Histogram(
    "motet_tpot_seconds",
    "Mean time per output token of a request, after the first token.",
    _LABELS,
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0),
    registry=REGISTRY,
)
E2E_S = Histogram(
    "motet_e2e_seconds",
    "Time from a request's arrival at the gateway to its last token.",
    _LABELS,
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
QUEUE_S = Histogram(
    "motet_queue_seconds",
    "Time from a request's arrival at a worker to its first prefill step.",
    _LABELS,
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
TOKENS = Counter(
    "motet_tokens", "Tokens of ended sequences by kind: prompt, cached, output.", [*_LABELS, "kind"], registry=REGISTRY
)
REQUESTS = Counter(
    "motet_requests",
    "Ended sequences by outcome: stop, length, cancelled or an error code.",
    [*_LABELS, "outcome"],
    registry=REGISTRY,
)
TENANT_TOKENS = Counter(
    "motet_tenant_tokens",
    "Tokens of ended sequences by tenant and kind: prompt, cached, output.",
    ["tenant", "kind"],
    registry=REGISTRY,
)
TENANT_REQUESTS = Counter(
    "motet_tenant_requests", "Ended sequences by tenant and outcome.", ["tenant", "outcome"], registry=REGISTRY
)
SLO_REQUESTS = Counter(
    "motet_slo_requests",
    "Finished sequences by objective (ttft, tpot) and whether it was met.",
    ["slo_class", "objective", "met"],
    registry=REGISTRY,
)
RESUMED = Counter(
    "motet_requests_resumed", "Requests resumed on a worker in a new epoch, by reason.", ["reason"], registry=REGISTRY
)
MOVED = Counter(
    "motet_requests_moved", "Requests handed to another worker because a scheduler asked for it.", registry=REGISTRY
)
RESUME_S = Histogram(
    "motet_request_resume_seconds",
    "Time from the loss of a request's worker to the request's next token.",
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
STRAYS = Counter(
    "motet_stray_items", "Token items of unknown or outdated requests that were answered with a Cancel.", registry=REGISTRY
)
REFUSED = Counter(
    "motet_gateway_refused",
    "Requests that this gateway refused by itself, by reason; repeated: a scheduler refused one like it just now.",
    ["reason"],
    registry=REGISTRY,
)
HTTP_ERRORS = Counter("motet_http_errors", "HTTP error answers by error code.", ["code"], registry=REGISTRY)
HANDSHAKES = Gauge("motet_gateway_tls_handshakes", "TLS connections whose handshake is not finished.", registry=REGISTRY)
HANDSHAKE_FAILURES = Counter(
    "motet_gateway_tls_handshake_failures",
    "TLS connections closed before the end of their handshake: by the client's fault or silence (client), at the limit of"
    " connections (limit).",
    ["cause"],
    registry=REGISTRY,
)
INFLIGHT = Gauge("motet_gateway_inflight", "Sequences in progress at this gateway.", registry=REGISTRY)

_adapters_met: set[str] = set()
_tenants_met: set[str] = set()


def adapter_label(stream: Stream) -> str:
    """The stream's adapter as a label of bounded cardinality."""
    adapter = stream.job.adapter
    if adapter is None:
        return "base"
    return _bounded(adapter.name, _adapters_met, ADAPTERS_MAX)


def tenant_label(stream: Stream) -> str:
    """The stream's tenant as a label of bounded cardinality."""
    return _bounded(stream.job.tenant, _tenants_met, TENANTS_MAX)


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
    REQUESTS.labels(*labels, outcome).inc()
    tenant = tenant_label(stream)
    TENANT_REQUESTS.labels(tenant, outcome).inc()
    for kind, count in (("prompt", len(stream.job.prompt)), ("cached", stream.cached_tokens), ("output", tokens)):
        TOKENS.labels(*labels, kind).inc(count)
        TENANT_TOKENS.labels(tenant, kind).inc(count)
    if not stream.first_s:
        return
    ttft_s = stream.first_s - stream.begun_s
    TTFT_S.labels(*labels).observe(ttft_s)
    QUEUE_S.labels(*labels).observe(stream.queue_ms / 1000)
    SLO_REQUESTS.labels(slo.slo_class, "ttft", _yes(ttft_s * 1000 <= slo.ttft_slo_ms)).inc()
    if stream.finish in ("stop", "length"):
        E2E_S.labels(*labels).observe(now - stream.begun_s)
        if tokens > 1:
            tpot_s = (now - stream.first_s) / (tokens - 1)
            TPOT_S.labels(*labels).observe(tpot_s)
            SLO_REQUESTS.labels(slo.slo_class, "tpot", _yes(tpot_s * 1000 <= slo.tpot_slo_ms)).inc()


def _yes(met: bool) -> str:
    return "yes" if met else "no"


class FleetCollector(Collector):
    """`vllm:*` gauges over all workers and the adapters' residency, computed at each scrape.

    `adapters()` returns all names. `vllm:lora_requests_info` follows the Gateway API inference extension's model-server
    protocol: a "running" adapter is resident on a device; a "waiting" one is on no device and a request waits for it. Each is
    listed by every name that requests may use. `max_lora` is the number of adapters of the present average size that fit on the
    devices.
    """

    def __init__(self, fleet: Fleet, model_name: str, adapters: Callable[[], list[AdapterInfo]]) -> None:
        self._fleet, self._model_name, self._adapters = fleet, model_name, adapters

    def describe(self) -> list[Metric]:
        """Returns nothing, because the series depend on the workers and are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        workers = list(self._fleet.workers())
        held = [self._fleet.held(known.worker_id) for known in workers]
        phases = Tally(brief.phase for one in held for brief in one.requests.values())
        total = sum(known.limits.kv_blocks_most for known in workers)
        free = sum(known.kv_blocks_free for known in workers)
        for name, text, value in (
            ("vllm:num_requests_waiting", "Sequences waiting on workers.", phases["waiting"] + phases["loading"]),
            ("vllm:num_requests_running", "Sequences running on workers.", phases["running"]),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", 1 - free / total if total else 0.0),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        adapters = self._adapters()
        names: dict[str, list[str]] = {}
        for info in adapters:
            names.setdefault(info.entry.digest, []).append(_name(info))
        capacity = self._capacity(workers, held)
        yield self._lora_info(held, names, capacity)
        pinned = {info.entry.digest for info in adapters if info.entry.pin is not None}
        yield from self._loaded(held, names, pinned, capacity)
        yield self._resident(held, names, pinned={_name(info) for info in adapters if info.entry.pin is not None})
        yield self._pins(workers, adapters)

    @staticmethod
    def _capacity(workers: list[Known], views: list[Holdings]) -> int:
        """How many adapters of the present average size fit on the devices."""
        held = [resident for view in views for resident in view.adapters.values()]
        capacity = sum(resident.tier == "device" for resident in held)
        if mean_bytes := sum(resident.size_bytes for resident in held) // max(len(held), 1):
            capacity += sum(known.adapter_bytes_free for known in workers) // mean_bytes
        return max(capacity, len(workers))

    def _loaded(self, views: list[Holdings], names: dict[str, list[str]], pinned: set[str], capacity: int) -> Iterator[Metric]:
        """Which adapters are loaded, also idle ones: as vLLM's pull request 54830 names them and llm-d's router reads them."""
        levels: dict[str, tuple[str, int]] = {}  # digest -> (level, rank)
        for view in views:
            for one in view.adapters.values():
                if one.tier == "device" or (one.tier == "host" and one.digest not in levels):
                    levels[one.digest] = (LEVELS[one.tier], one.rank)
        counts = Tally(level for level, _ in levels.values())
        for name, text, value in (
            ("vllm:num_gpu_loaded_lora_adapters", "Adapters on a device.", counts["gpu"]),
            ("vllm:num_cpu_loaded_lora_adapters", "Adapters in the host memory of workers, on no device.", counts["cpu"]),
            ("vllm:max_gpu_lora_adapters", "Adapters of the present average size that fit on the devices.", capacity),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        family = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "1 for each name of a loaded adapter, with the fastest level that holds it.",
            labels=["model_name", "adapter_name", "level", "pinned", "rank"],
        )
        shown = sorted(levels.items(), key=lambda item: (item[1][0] != "gpu", item[0]))[:LOADED_MAX]
        for digest, (level, rank) in shown:
            for name in names.get(digest, ()):
                family.add_metric([self._model_name, name, level, str(digest in pinned).lower(), str(rank)], 1)
        yield family

    def _lora_info(self, views: list[Holdings], names: dict[str, list[str]], capacity: int) -> Metric:
        held = [resident for view in views for resident in view.adapters.values()]
        running = {resident.digest for resident in held if resident.tier == "device"}
        waiting = {
            brief.adapter_digest
            for view in views
            for brief in view.requests.values()
            if brief.adapter_digest and brief.phase != "running" and not view.on_device(brief.adapter_digest)
        }
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters on the device and adapters waited for; the value is the time of the scrape.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        listed = [
            ",".join(sorted(name for digest in digests for name in names.get(digest, [digest[:12]])))
            for digests in (running, waiting)
        ]
        family.add_metric([str(capacity), *listed], unix_ms() / 1000)
        return family

    def _resident(self, views: list[Holdings], names: dict[str, list[str]], pinned: set[str]) -> Metric:
        """Counts of workers by adapter and tier; adapters that are neither pinned nor in other metrics are "other"."""
        shown = _adapters_met | pinned
        counts = Tally[tuple[str, str]]()
        for view in views:
            for one in view.adapters.values():
                known = [name for name in names.get(one.digest, ()) if name in shown]
                counts.update((name, one.tier) for name in known or ["other"])
        family = GaugeMetricFamily(
            "motet_adapter_workers", "Workers that hold an adapter, by its fastest tier there.", labels=["adapter", "tier"]
        )
        for (name, tier), count in sorted(counts.items()):
            family.add_metric([name, tier], count)
        return family

    def _pins(self, workers: list[Known], adapters: list[AdapterInfo]) -> Metric:
        family = GaugeMetricFamily("motet_adapter_pins", "Workers that an adapter is pinned to.", labels=["adapter"])
        for info in adapters:
            if (pin := info.entry.pin) is not None:
                family.add_metric([_name(info)], sum(pin.covers(known.worker_id) for known in workers))
        return family


def _name(info: AdapterInfo) -> str:
    return qualified(info.entry.name, info.entry.tenant)
