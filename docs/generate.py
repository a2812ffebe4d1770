"""Writes docs/configuration.md and docs/metrics.md from the code, so that they cannot be wrong: `python docs/generate.py`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from shared.config import ServiceConfig, fields  # noqa: E402
from shared.telemetry import REGISTRY  # noqa: E402

METRICS_PAGE = """# Metrics

Written by `python docs/generate.py`. Every service exposes `/metrics` on its ops port, the gateway on its main port too.
Times are seconds, sizes bytes.

| name | type | labels | meaning |
| --- | --- | --- | --- |
{rows}

The gateway also exposes, over all workers, the names that Kubernetes inference gateways scrape:
`vllm:num_requests_waiting`, `vllm:num_requests_running`, `vllm:kv_cache_usage_perc` and
`vllm:lora_requests_info{{max_lora,running_lora_adapters,waiting_lora_adapters}}`, where a running adapter is one that is
resident on a device.
"""
SERVICES = ("gateway", "predictor", "scheduler", "registry", "worker")


def configuration() -> str:
    """Every setting of every service: flag, variable, default, meaning."""
    out = [
        "# Configuration",
        "",
        "Written by `python docs/generate.py`. A flag wins over its environment variable, that over the default. A",
        "setting whose name ends in `-file` is a path to a file that holds the secret.",
        "",
        "## Every service",
        "",
        *_settings(ServiceConfig, set()),
    ]
    common = {field.name for field in fields(ServiceConfig)}
    for service in SERVICES:
        module = importlib.import_module(f"services.{service}.config")
        config = getattr(module, f"{service.capitalize()}Config")
        own = _settings(config, common)
        out += ["", f"## motet {service}", "", *(own if len(own) > 2 else ["Nothing of its own."])]
    return "\n".join(out) + "\n"


def _settings(config: type[msgspec.Struct], leave_out: set[str]) -> list[str]:
    rows = ["| flag | variable | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields(config):
        if field.name in leave_out:
            continue
        default = "required" if field.default is msgspec.NODEFAULT else f"`{field.default}`" if field.default != "" else ""
        rows.append(f"| `{field.flag}` | `{field.variable}` | {default} | {field.description.replace('|', '/')} |")
    return rows


def metrics() -> str:
    """Every metric: name, type, labels, meaning."""
    for service in SERVICES:
        for module in ("metrics", "service", "intake"):
            if (ROOT / "services" / service / f"{module}.py").exists():
                importlib.import_module(f"services.{service}.{module}")
    rows = []
    for collector, names in sorted(REGISTRY._collector_to_names.items(), key=lambda item: item[1][0]):
        name = names[0]
        if not name.startswith("motet_"):
            continue
        kind = getattr(collector, "_type", "gauge")
        name = f"{name}_total" if kind == "counter" else name
        labels = ", ".join(getattr(collector, "_labelnames", ()))
        rows.append(f"| `{name}` | {kind} | {labels} | {getattr(collector, '_documentation', '')} |")
    return METRICS_PAGE.format(rows="\n".join(rows))


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (ROOT / "docs" / page).write_text(write())
