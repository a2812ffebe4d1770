"""A worker's engine without the worker: called directly, with requests that all come at once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from motet.shared.clock import now_s

_laps = count()  # request ids never repeat


def host_adapters(assembly: Any, model: Path, adapters: Sequence[str]) -> list[Any]:
    """The adapters of PEFT directories in the host memory of an assembled worker, as from its disk tier."""
    from bench.stored_adapters import stored_adapter

    found = []
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:  # mapped: adapters outlive it
        for adapter in adapters:
            stored = stored_adapter(model, Path(adapter))
            file = Path(directory) / stored.digest
            file.write_bytes(stored.blob)
            found.append(assembly.parse_adapter(file, stored.digest))
    return found


def run_engine(
    engine: Any, prompts: list[list[int]], max_tokens: int, adapters: Sequence[Any]
) -> Iterator[tuple[int, list[int]]]:
    """Give the engine all prompts, each with its adapter or None, and step until all have ended.

    Yields (index of the prompt, new tokens). Raises the error of a request that ends before its `max_tokens`.
    """
    from motet.services.worker.engines.request import EngineRequest
    from motet.shared.model import SamplingParams

    lap, now = next(_laps), now_s()
    for i, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=i, ignore_eos=True)
        request = EngineRequest.local(f"{lap}-{i}", prompt, sampling, weights=adapter, gateway_id="g", arrival_s=now)
        engine.add(request, now)
    while engine.has_work():
        output = engine.step(now_s())
        if output.failure is not None:
            raise output.failure
        for item in output.items.get("g", []):
            if item.error is not None:
                raise RuntimeError(f"request {item.request_id}: {item.error.message}")
            yield int(item.request_id.partition("-")[2]), item.tokens
