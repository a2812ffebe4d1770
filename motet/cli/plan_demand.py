"""What a plan is asked to serve: from a list of adapters, a recorded or generated workload, or a running mesh."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from motet.cli.client import Client
from motet.cli.workload_options import MOST_ADAPTERS, adapter_bytes, build, pool
from motet.shared.model import Slo
from motet.twin.planning.adapter_list import read_adapters
from motet.twin.planning.loads import Loads, Objective, from_workload
from motet.twin.workload import Lengths, rank_mix, zipf

MIB = 1 << 20
BASE, OTHER = "base", "other"
"""Labels of the gateway's metrics: the base model, and all adapters beyond those that it lists."""


def loads_of(options: Mapping[str, Any], objectives: Mapping[str, Objective]) -> Loads:
    """The loads that the options of `motet plan` describe. Raises UsageError, FileError, ApiError, ValueError."""
    rng = np.random.default_rng(options["seed"])
    if options["trace"] or options["popularity"]:
        return _recorded(options, objectives, rng)
    adapters = options["adapters"]
    if adapters is None:
        raise click.UsageError("what is to be served? Give --adapters, --trace, --popularity or --from")
    if adapters.isdigit():
        return _generated(int(adapters), options, objectives, rng)
    path = Path(adapters)
    if not path.is_file():
        raise click.UsageError(f"--adapters {adapters}: neither a number nor a file")
    loads = read_adapters(
        path,
        objectives=objectives,
        rank_bytes=options["rank_mib"] * MIB,
        prompt_tokens=options["prompt_tokens"],
        output_tokens=options["output_tokens"],
        lengths=pool(rng, dict(options)) if options["lengths"] else None,
        cv=options["cv"],
    )
    return loads.faster(options["rate"] / float(loads.rate.sum())) if options["rate"] else loads


def _recorded(options: Mapping[str, Any], objectives: Mapping[str, Objective], rng: np.random.Generator) -> Loads:
    adapters = options["adapters"] or "64"
    if not adapters.isdigit():
        raise click.UsageError("--adapters with a file and a trace: give one of them")
    described = {**options, "adapters": int(adapters), "duration_s": None, "shape": "constant"}
    if not options["trace"]:  # a day of counts per minute; the rates of its windows are what matters
        described["duration_s"] = 86_400.0
    workload = build(rng, described, next(iter(objectives.values())).slo)
    return from_workload(workload, tuple(objectives.values()), percentile=options["percentile"])


def _generated(count: int, options: Mapping[str, Any], objectives: Mapping[str, Objective], rng: np.random.Generator) -> Loads:
    if not 1 <= count <= MOST_ADAPTERS:
        raise click.UsageError(f"--adapters {count}: not a number from 1 to {MOST_ADAPTERS}")
    ranks = rank_mix(rng, count, options["ranks"])
    return Loads(
        names=tuple(f"adapter-{place:05d}" for place in range(count)),
        rate=zipf(count, options["exponent"]) * (options["rate"] or 4.0),
        rank=ranks,
        size_bytes=adapter_bytes(ranks, dict(options)),
        pool=np.zeros(count, np.int64),
        objective=np.zeros(count, np.int64),
        lengths=(pool(rng, dict(options)),),
        objectives=tuple(objectives.values())[:1],
        cv=options["cv"],
        peakedness=max(1.0, options["cv"] ** 2),
    )


# ---- a running mesh

Counts = dict[tuple[str, str], dict[str, float]]
"""By adapter and class: requests, prompt and output tokens so far."""


def live(url: str, watch_s: float, objectives: Mapping[str, Objective], say: Callable[[str], None]) -> Loads:
    """The rates that a running mesh had while it was watched, with the ranks and sizes of its registry. Raises ApiError.

    Lengths are log-normal with the means that were seen. What the gateway counts as "other" is spread evenly over the adapters
    that it does not list. Raises ValueError if no request ended meanwhile, and for a mesh that draws pictures.
    """

    async def ask() -> tuple[Counts, Counts, list[dict[str, Any]]]:
        async with Client(url) as client:
            status = await client.call("GET", "/v1/status")
            refuse_pictures(status["workers"])
            before = counts(await client.call("GET", "/metrics"))
            say(f"watching {url} for {watch_s:g} s")
            await asyncio.sleep(watch_s)
            after = counts(await client.call("GET", "/metrics"))
            known = await client.call("GET", "/v1/adapters")
            return before, after, known["data"]

    before, after, known = asyncio.run(ask())
    return seen(before, after, known, watch_s, objectives)


def refuse_pictures(workers: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError naming a worker that draws pictures."""
    drawing = next((worker["worker_id"] for worker in workers if "draws" in worker.get("capabilities", ())), None)
    if drawing is not None:
        raise ValueError(f"--from: worker {drawing} draws pictures; only meshes that generate text are planned")


def counts(text: str) -> Counts:
    """The counters of the gateway's metrics that say what was asked."""
    found: Counts = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.labels.get("adapter", ""), sample.labels.get("slo_class", ""))
            if sample.name == "motet_requests_total":
                found[key]["requests"] += sample.value
            elif sample.name == "motet_tokens_total" and sample.labels["kind"] in ("prompt", "output"):
                found[key][sample.labels["kind"]] += sample.value
    return found


def seen(
    before: Counts,
    after: Counts,
    known: Sequence[Mapping[str, Any]],
    watch_s: float,
    objectives: Mapping[str, Objective],
) -> Loads:
    """The loads between two readings. `known`: the registry's adapters."""
    rows, classes = _asked(before, after)
    if not rows:
        raise ValueError(f"no request ended in {watch_s:g} s; watch for longer with --watch-s, or give --adapters")
    ranks = {BASE: (0, 0)} | {adapter["name"]: (int(adapter["rank"]), int(adapter["size_bytes"])) for adapter in known}
    if OTHER in rows:
        rest = [name for name in ranks if name not in rows and name != BASE] or [OTHER]
        rows |= dict.fromkeys(rest, _divided(rows.pop(OTHER), len(rest)))
        classes |= dict.fromkeys(rest, classes[OTHER])
    given = dict(objectives)
    for _, name in classes.values():
        given.setdefault(name, Objective(slo=Slo(slo_class=name)))
    order = list(given)
    names = [name for name in rows if name in ranks]
    means = [_means(rows[name]) for name in names]
    pools = {mean: place for place, mean in enumerate(dict.fromkeys(means))}
    return Loads(
        names=tuple(names),
        rate=np.array([rows[name]["requests"] / watch_s for name in names]),
        rank=np.array([ranks[name][0] for name in names], np.int64),
        size_bytes=np.array([ranks[name][1] for name in names], np.int64),
        pool=np.array([pools[mean] for mean in means], np.int64),
        objective=np.array([order.index(classes[name][1]) for name in names], np.int64),
        lengths=tuple(
            Lengths.lognormal(np.random.default_rng(0), prompt_mean=prompt, output_mean=output) for prompt, output in pools
        ),
        objectives=tuple(given.values()),
    )


def _asked(before: Counts, after: Counts) -> tuple[dict[str, dict[str, float]], dict[str, tuple[float, str]]]:
    """By adapter: requests, prompt and output tokens between two readings, and (requests, class) of its most frequent class."""
    rows: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    classes: dict[str, tuple[float, str]] = {}
    for (name, slo_class), now in after.items():
        was = before.get((name, slo_class), {})
        requests = now["requests"] - was.get("requests", 0.0)
        if requests > 0:
            for kind in ("requests", "prompt", "output"):
                rows[name][kind] += now.get(kind, 0.0) - was.get(kind, 0.0)
            classes[name] = max(classes.get(name, (0.0, "")), (requests, slo_class))
    return rows, classes


def _divided(counts: Mapping[str, float], parts: int) -> dict[str, float]:
    return {kind: value / parts for kind, value in counts.items()}


def _means(counts: Mapping[str, float]) -> tuple[float, float]:
    """Prompt and output tokens per request."""
    return _rounded(counts["prompt"] / counts["requests"]), _rounded(counts["output"] / counts["requests"])


def _rounded(tokens: float) -> float:
    """Two digits, so that adapters with about the same lengths share a pool."""
    return max(1.0, float(f"{tokens:.2g}"))
