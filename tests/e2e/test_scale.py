"""Promise: autoscalers read what schedulers decide; `motet up` follows it, to no worker and back, and no request is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from motet.cli.client import Client
from motet.examples.demo import BASE
from tests.e2e.asking import answer
from tests.e2e.live import ROOT, LiveStack
from tests.support import eventually

KEDA = ROOT / "examples" / "keda"


def documents(name: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((KEDA / name).read_text()) if one["kind"] == kind]


@pytest.fixture
def sleepy(tmp_path: Path) -> Iterator[LiveStack]:
    """A stack whose only worker leaves when nobody asks for 2 s."""
    live = LiveStack(tmp_path, "--workers", "0..2", "--scale", "act", "--scale-idle-s", "2")
    live.launch()
    yield live
    live.stop()


async def series(live: LiveStack, name: str, labels: dict[str, str]) -> list[float]:
    """The values of these series on a scheduler's /metrics."""
    url = live.facts().services["scheduler-1"]["ops_url"]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as page:
        lines = (await page.text()).splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{") and all(w in line for w in wanted)]


async def test_what_keda_and_hpa_are_told_to_read_is_there(stack: LiveStack, client: Client) -> None:
    (prometheus,), (http,) = documents("prometheus.yaml", "ScaledObject"), documents("http.yaml", "ScaledObject")
    (hpa,) = documents("hpa.yaml", "HorizontalPodAutoscaler")
    (trigger,) = prometheus["spec"]["triggers"]
    name, inside = re.fullmatch(r"max\((\w+)\{(.*)\}\)", trigger["metadata"]["query"]).groups()
    labels = dict(re.findall(r'(\w+)="([^"]*)"', inside))
    external = hpa["spec"]["metrics"][0]["external"]["metric"]
    assert (external["name"], external["selector"]["matchLabels"]) == (name, labels)
    assert labels["base_model"] == BASE
    await eventually(lambda: series(stack, name, labels), within_s=40)
    assert await series(stack, name, labels) == [2.0]
    (asked,) = http["spec"]["triggers"]
    path = re.sub(r"^https?://[^/]+", "", asked["metadata"]["url"])
    told = await client.call("GET", path)
    assert told[asked["metadata"]["valueLocation"]] == 2
    for one in (trigger["metadata"]["threshold"], asked["metadata"]["targetValue"]):
        assert one == "1", "the value is the number of workers"
    assert {one["metricType"] for one in (trigger, asked)} == {"AverageValue"}


async def test_a_stack_goes_to_no_worker_and_a_request_brings_one_back(sleepy: LiveStack) -> None:
    facts = await asyncio.to_thread(sleepy.wait_ready)
    (url,) = facts.urls
    await eventually(lambda: "worker-1" not in sleepy.facts().services, within_s=60)
    async with Client(url, timeout_s=60.0) as client:
        told = await client.call("GET", f"/v1/scale/{BASE}")
        assert told["desired"] == 0
        assert await asyncio.gather(*(answer(client, "upper-case", text) for text in ("hello there", "good morning"))) == [
            "HELLO THERE",
            "GOOD MORNING",
        ]
        assert any(name.startswith("worker") for name in sleepy.facts().services), "worker-1, or worker-2 while that one leaves"
