"""Pictures with many adapters: one mixed denoising batch, and diffusers in every way in which people serve adapters with it.

The model has the image demo's architecture and random weights, so its pictures mean nothing and its times are the
demo's. 32 adapters have ranks 8, 16, 32, 64 in turn, half of them on attention, half on every linear layer. All ways draw the
same pictures, 15 DDIM steps with guidance, in turns, each with the number of threads that suits it best under each load:

    set_adapters    diffusers, one request at a time, all adapters loaded, `set_adapters` for each
    fuse            diffusers, one request at a time, `fuse_lora` before it and `unfuse_lora` after
    equal batches   diffusers, a batch for all requests with equal adapters, one batch after the other. With one adapter for
                    all it is the upper bound of diffusers; with an adapter each it is `set_adapters`
    motet           the engine of a worker, all requests in one batch; it writes PNG files as well
    as started      the same with one thread, as `motet up --demo-images` starts it. The ratios are of this one

`latents_error`: the largest difference of Motet's latents from those of `set_adapters`, over the largest latent, in any load.
The *varied* load has several adapters per request, other weights and step counts, and requests without guidance, which
diffusers cannot put in a batch. Then: a picture whose adapter must be copied, beside one whose adapter is there, while others
are drawn. And the share of the trained demo's pictures of unseen captions that its checker calls by the right style.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import images_arrivals, report
from motet.shared.clock import now_s

STEPS, GUIDANCE = 15, 2.0
ADAPTERS = 32
LOADS = ((1, 0), (1, 1), (8, 0), (8, 1), (8, 8), (32, 0), (32, 1), (32, 8), (32, 32))
QUICK_LOADS = ((4, 0), (4, 4))
PROMPT = "a red circle on sky"
ROUNDS = 3
VARIED = 16
COLD_ROUNDS, BESIDE = 9, 7
CAPTIONS = 100
BATCH = 50
PARTS = ("batch", "cold", "styles")


@dataclass(slots=True)
class Way:
    """One way to draw pictures, with the threads that suit it best and its times, by load."""

    draw: Callable[[Sequence[Any]], dict[int, np.ndarray]]
    threads: dict[tuple[int, int], int] = field(default_factory=dict)
    images_per_s: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def rate(self, load: tuple[int, int]) -> float:
        """Images per second, the median of all rounds."""
        return statistics.median(self.images_per_s[load])


def arguments(parser: argparse.ArgumentParser) -> None:
    """The bench's own options."""
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all", help="what to measure")
    parser.add_argument("--arrivals", action="store_true", help="the order of steps, in the twin (bench.images_arrivals)")
    parser.add_argument(
        "--live-vs-twin", action="store_true", help="a live worker and the twin of its profile (bench.images_live)"
    )
    parser.add_argument("--trace", type=Path, help="requests of GenTD26 for --arrivals; without it they are drawn")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables, return the figures."""
    if args.arrivals:
        return images_arrivals.measure(args)
    if args.live_vs_twin:
        from bench import images_live

        return images_live.measure(args)
    warnings.filterwarnings("ignore")
    from diffusers.utils import logging as said

    said.set_verbosity_error()
    said.disable_progress_bar()
    parts = PARTS if args.part == "all" else (args.part,)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        if "batch" in parts or "cold" in parts:
            bed = Bed(Path(directory), 4 if args.quick else ADAPTERS)
            if "batch" in parts:
                figures |= batches(args, bed)
            if "cold" in parts:
                figures |= cold(args, bed)
        if "styles" in parts:
            figures |= styles(args)
    return figures


class Bed:
    """The checkpoint with its adapters, diffusers' pipelines and Motet's engine."""

    def __init__(self, directory: Path, adapters: int) -> None:
        from bench.images_diffusers import Asked, Diffusers
        from bench.images_files import write_adapters, write_checkpoint
        from bench.images_motet import Motet

        self._asked = Asked
        model = write_checkpoint(directory)
        self.adapters = write_adapters(model, directory / "adapters", adapters)
        self.diffusers = Diffusers(model, self.adapters)
        self.motet = Motet(model, self.adapters, self.diffusers.tokens)

    def asked(self, requests: int, distinct: int) -> list[Any]:
        """Requests on so many distinct adapters in turn."""
        return [self.one(i, ((self.adapters[i % distinct].name, 1.0),) if distinct else ()) for i in range(requests)]

    def one(self, seed: int, adapters: tuple[tuple[str, float], ...], steps: int = STEPS, guidance: float = GUIDANCE) -> Any:
        """One request."""
        return self._asked(PROMPT, seed, steps, guidance, adapters)

    def varied(self, requests: int) -> list[Any]:
        """Requests of every kind."""
        draw, found = np.random.default_rng(0), []
        for i in range(requests):
            count = (0, 1, 1, 1, 2, 1, 3, 1)[i % 8]
            names = draw.choice(len(self.adapters), count, replace=False)
            weights = draw.choice([1.0, 0.8, 0.6, 0.3], count)
            chosen = tuple((self.adapters[n].name, float(w)) for n, w in zip(names, weights, strict=True))
            found.append(self.one(1000 + i, chosen, int(draw.integers(8, 24)), (GUIDANCE, 1.0, 4.0)[i % 3]))
        return found


def batches(args: argparse.Namespace, bed: Bed) -> dict[str, Any]:
    """Images per second of every way under every load."""
    ways = {
        "set_adapters": Way(bed.diffusers.set_adapters),
        "fuse": Way(bed.diffusers.fuse),
        "equal batches": Way(bed.diffusers.equal_batches),
        "motet": Way(bed.motet.draw),
        "as started": Way(bed.motet.draw, dict.fromkeys(LOADS + QUICK_LOADS, 1)),
    }
    loads, rounds, cores = (QUICK_LOADS, 1, 1) if args.quick else (LOADS, ROUNDS, len(os.sched_getaffinity(0)))
    for way in ways.values():
        way.draw(bed.asked(*loads[-1])[:2])  # nobody waits for lazy initialisation
    worst = 0.0
    for _ in args.watch.rounds(rounds):
        for load in loads:
            asked = bed.asked(*load)
            expected: dict[int, np.ndarray] = {}
            for way in ways.values():
                latents = _timed(way, load, asked, cores)
                expected = expected or latents
                if way.draw == bed.motet.draw:
                    worst = max(worst, error(latents, expected))
    varied = bed.varied(min(VARIED, 4 * len(loads)))
    worst_varied = error(bed.motet.draw(varied), bed.diffusers.set_adapters(varied))
    rows = [
        [f"{requests} / {distinct}", *(way.rate((requests, distinct)) for way in ways.values())] for requests, distinct in loads
    ]
    print(report.table("images per second (requests / distinct adapters)", ["load", *ways], rows))
    alone = {name: [f"{n}/{k}" for n, k in loads if way.threads[n, k] == 1] for name, way in ways.items()}
    del alone["as started"]
    print("faster with one thread: " + "; ".join(f"{name} {', '.join(some) or 'never'}" for name, some in alone.items()))
    print(f"latents: error {worst:.1e}, varied {worst_varied:.1e}")
    motet, last, plain = ways["as started"], loads[-1], (loads[-1][0], 0)
    figures = {
        "images": {f"{n}/{k}": {name: round(way.rate((n, k)), 2) for name, way in ways.items()} for n, k in loads},
        "one_thread": alone,
        "mixed_vs_set_adapters_32": _over(motet, last, ways["set_adapters"], last),
        "mixed_vs_fuse_32": _over(motet, last, ways["fuse"], last),
        "mixed_vs_no_lora_32": _over(motet, last, motet, plain),
        "mixed_vs_set_adapters_32_best_threads": _over(ways["motet"], last, ways["set_adapters"], last),
        "mixed_vs_no_lora_32_best_threads": _over(ways["motet"], last, ways["motet"], plain),
        "latents_error": max(worst, worst_varied),
    }
    return (
        figures if args.quick else figures | {"mixed_vs_diffusers_bound_32": _over(motet, last, ways["equal batches"], (32, 1))}
    )


def _over(way: Way, load: tuple[int, int], other: Way, its_load: tuple[int, int]) -> float:
    """The rate of a way under a load over that of another, the median of the rounds."""
    pairs = zip(way.images_per_s[load], other.images_per_s[its_load], strict=True)
    return round(statistics.median(one / two for one, two in pairs), 3)


def _timed(way: Way, load: tuple[int, int], asked: Sequence[Any], cores: int) -> dict[int, np.ndarray]:
    """Draw with the number of threads that was fastest the first time, and note the rate; returns the latents."""
    import torch

    tried, latents = {}, {}
    for threads in [way.threads[load]] if load in way.threads else range(1, cores + 1):
        torch.set_num_threads(threads)
        began_s = now_s()
        latents = way.draw(asked)
        tried[threads] = len(asked) / (now_s() - began_s)
    way.threads[load] = max(tried, key=lambda threads: tried[threads])
    way.images_per_s.setdefault(load, []).append(tried[way.threads[load]])
    return latents


def error(found: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> float:
    """The largest difference of a request's latents, over its largest latent."""
    assert found.keys() == expected.keys(), "every request has latents"
    return max(float(np.abs(found[seed] - expected[seed]).max() / np.abs(expected[seed]).max()) for seed in expected)


def cold(args: argparse.Namespace, bed: Bed) -> dict[str, Any]:
    """The time of a picture whose adapter is copied beside others' steps, over that of one whose adapter is there."""
    rounds, beside = (1, 2) if args.quick else (COLD_ROUNDS, BESIDE)
    times: dict[str, list[float]] = {"cached": [], "cold": []}
    for number in range(rounds):
        for way, seen in times.items():
            chosen = bed.adapters[number % len(bed.adapters)].name
            if way == "cold":
                bed.motet.engine.unload_adapter(bed.motet.hosts[chosen].digest)
            else:
                bed.motet.draw([bed.one(1, ((chosen, 1.0),))])
            seen.append(_beside(bed, chosen, beside, number))
    ratio = statistics.median(a / b for a, b in zip(times["cold"], times["cached"], strict=True))
    rows = [[way, 1e3 * statistics.median(seen), 1e3 * max(seen)] for way, seen in times.items()]
    print(report.table(f"a picture that joins {beside} others, ms", ["its adapter", "median", "worst"], rows))
    return {"cold_vs_cached": round(ratio, 3)}


def _beside(bed: Bed, name: str, beside: int, number: int) -> float:
    """Seconds of a picture that joins others after their first steps."""
    engine = bed.motet.engine
    others = [one for one in bed.adapters if one.name != name]
    for i in range(beside):
        engine.add(bed.motet.request(bed.one(100 + i, ((others[(number + i) % len(others)].name, 1.0),), 3 * STEPS)), now_s())
    for _ in range(3):
        bed.motet.step()
    request = bed.motet.request(bed.one(99, ((name, 1.0),)))
    began_s, took_s = now_s(), 0.0
    engine.add(request, began_s)
    while engine.has_work():
        if any(item.request_id == request.request_id and item.finish for item in bed.motet.step()):
            took_s = now_s() - began_s
    return took_s


def styles(args: argparse.Namespace) -> dict[str, Any]:
    """The share of pictures of unseen captions that have the style of their adapter, and of the base's that are plain."""
    from transformers import CLIPTokenizer

    from bench.images_diffusers import Asked
    from bench.images_files import Adapter
    from bench.images_motet import Motet
    from motet.examples.demo_images import DEMO_IMAGES
    from motet.examples.demo_images.checker import confusions
    from motet.examples.demo_images.scenes import captions_of
    from motet.examples.demo_images.styles import PLAIN

    model, folders = DEMO_IMAGES / "model", sorted((DEMO_IMAGES / "adapters").iterdir())
    tokenizer = CLIPTokenizer.from_pretrained(model / "tokenizer")

    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer(text, padding="max_length", max_length=tokenizer.model_max_length).input_ids
        return found

    motet = Motet(model, [Adapter(folder.name, folder, 0, ()) for folder in folders], tokens)
    unseen = captions_of("unseen")
    captions = [unseen[i % len(unseen)] for i in range(4 if args.quick else CAPTIONS)]
    names = [PLAIN, *(folder.name for folder in folders)]
    wanted = [(name, caption) for caption in captions for name in names]  # neighbours have different adapters
    pictures: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for start in range(0, len(wanted), BATCH):
        some = wanted[start : start + BATCH]
        asked = [
            Asked(str(caption), start + i, STEPS, GUIDANCE, () if name == PLAIN else ((name, 1.0),))
            for i, (name, caption) in enumerate(some)
        ]
        for (name, _), picture in zip(some, motet.pictures(asked), strict=True):
            pictures[name].append(picture)
    right = {name: confusions(drawn, captions).get(name, 0) / len(captions) for name, drawn in pictures.items()}
    print(report.table("pictures in the right style", ["style", "share"], [[name, share] for name, share in right.items()]))
    return {
        "styles_right": round(statistics.mean(share for name, share in right.items() if name != PLAIN), 4),
        "worst_style": min(right, key=lambda name: right[name]),
        "worst_style_right": min(right.values()),
        "plain_right": right[PLAIN],
    }
