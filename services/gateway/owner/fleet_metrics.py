"""The metrics of workers and adapters that are computed at a scrape: `motet_*`, and the `vllm:*` names that Kubernetes
inference gateways read.

The metrics of an adapter's location name the adapters that the `adapter` label knows (`owner.observe`), and pinned ones.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from motet.policies.cluster.worker_book import Holdings, Known
from motet.services.gateway.owner import observe
from motet.services.gateway.owner.fleet import Fleet
from motet.shared.clock import unix_ms
from motet.shared.tenancy import qualified
from motet.shared.wire.registry import AdapterInfo

LOADED_MAX = 1000  # adapters listed as loaded, those on devices first
LEVELS = {"device": "gpu", "host": "cpu"}  # vLLM's words for tiers, also where the device is a CPU


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
        shown = observe.adapters_met | pinned
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
