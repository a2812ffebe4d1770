"""What a gateway and the services of a mesh say of themselves over HTTP."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.rig.waiting import until

WAIT_S = 60.0


def get(url: str, headers: Mapping[str, str] = {}, *, body: Mapping[str, Any] | None = None) -> str:
    """The text of the answer to a GET, or to a POST if there is a JSON body. Raises urllib.error.HTTPError."""
    asked = urllib.request.Request(url, headers=dict(headers))
    if body is not None:
        asked.data = json.dumps(body).encode()
        asked.add_header("content-type", "application/json")
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return str(answer.read().decode())


def wait_for(port: int, models: Sequence[str], headers: Mapping[str, str] = {}) -> None:
    """Wait until the gateway knows all `models`. Raises RuntimeError if it never does."""

    def known() -> bool:
        cards = json.loads(get(f"http://127.0.0.1:{port}/v1/models", headers))["data"]
        return set(models) <= {card["id"] for card in cards}

    until(known, lambda: f"the mesh does not serve {', '.join(models)}", within_s=WAIT_S)


def metric(ops_url: str, name: str, headers: Mapping[str, str] = {}) -> float:
    """The present value of a service's metric, summed over its labels; 0 while it has none."""
    families = text_string_to_metric_families(get(f"{ops_url}/metrics", headers))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
