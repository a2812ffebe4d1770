"""Writes configuration.md, metrics.md and api.md from the code, so that they cannot be wrong: `python docs/generate.py`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from services.gateway import fields as unserved  # noqa: E402
from services.gateway.config import GatewayConfig  # noqa: E402
from services.gateway.openapi import document  # noqa: E402
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


API_PAGE = """# The HTTP API

Written by `python docs/generate.py`. A running gateway serves its whole description at `/openapi.json` and shows it at `/docs`:
every route, field, limit and error.

- Bodies are JSON and say so: without `Content-Type: application/json` the answer is 415. `curl -d` alone sends another type, so
  add `-H 'content-type: application/json'`. The reason: a web page can send any other type to this machine without asking.
- Without API keys, and listening on a loopback address, the `Host` header must be a loopback name, `--host`, or one of
  `--allowed-hosts`; an `Origin` header must be of the same host or one of `--allowed-origins`. Anything else is a 403. With
  `--allowed-origins` the answers carry CORS headers. Behind a proxy that passes the public name on, list that name.
- Every answer has `X-Request-Id`: the request's own, or a random one. An answer's `id` is `chatcmpl-` or `cmpl-` and that id.
- An `Idempotency-Key` on a generating request makes it run once per gateway: sent again it waits for, or gets, the same answer.
- 429 says when to come back: `Retry-After` (seconds), `retry-after-ms`. A tenant with limits gets OpenAI's `x-ratelimit-*`.
- A stream that is silent for 10 s sends the comment `: keep-alive`.
- Every error is `{{"error": {{"message", "type", "param", "code"}}}}`; `param` names the field or header.
- Connections are closed (408) when a request's headers take longer than 15 s, or its body comes slower than 4 KiB/s after
  30 s. More than 128 headers or 64 KiB of them are a 431.

## Request fields

What happens to each field that clients of OpenAI's API, vLLM, SGLang and LoRAX send. Nothing is dropped silently: a field is
*served*, or *taken* without effect because it cannot change the answer, or *refused* with a 400 that names it, except with
values that ask for nothing. A field that is not in the table is refused as unknown. Durable requests over NATS follow the same
table.

{tables}
"""
_SCHEMAS = {"chat": ("ChatRequest", unserved.CHAT), "completions": ("CompletionRequest", unserved.COMPLETION)}


def api() -> str:
    """What happens to every request field that clients of other servers send."""
    clients: dict[str, Any] = json.loads((ROOT / "docs" / "client_fields.json").read_text())
    schemas = document(GatewayConfig(model="model"), "")["components"]["schemas"]
    parts = []
    for kind, (schema, others) in _SCHEMAS.items():
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        parts += [f"### POST {path}", "", "| field | of | what happens |", "| --- | --- | --- |"]
        properties = schemas[schema]["properties"]
        for name in sorted(properties):
            of = ", ".join(client for client, names in clients[kind].items() if name in names)
            if name not in others:
                happens = f"served: {_sentence(properties[name]['description'])}"
            elif (harmless := others[name].harmless) is None:
                happens = f"taken: {others[name].why}"
            else:
                values = ", ".join(f"`{json.dumps(value)}`" for value in harmless)
                happens = f"refused except {values}: {others[name].why}"
            parts.append(f"| `{name}` | {of} | {happens} |")
        parts.append("")
    return API_PAGE.format(tables="\n".join(parts).rstrip())


def _sentence(text: str) -> str:
    return text.rstrip(".").replace("|", "/")


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "api.md": api}

if __name__ == "__main__":
    for page, write in PAGES.items():
        (ROOT / "docs" / page).write_text(write())
