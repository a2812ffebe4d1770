"""Opens the engine that a worker's configuration names: `config.ENGINES` has the function of each.

    open_engine ──> Opened.engine, not started ──(start)──> Opened.facts()

An opening checks what can be checked at once and starts nothing. The worker then starts the engine and asks for the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from motet.policies.times.step_times import StepTimes
from motet.services.worker.config import ENGINES, WorkerConfig
from motet.services.worker.engines.image_limits import ImageLimits
from motet.services.worker.engines.protocol import EngineProtocol
from motet.services.worker.engines.request import StepReport
from motet.shared.model import Mechanism, WorkerLimits


@dataclass(frozen=True, slots=True)
class Wiring:
    """The worker's side of an engine."""

    deliver: Callable[[StepReport], None]
    """Takes each report, in the event loop."""
    times: StepTimes
    """The worker's estimate of step times, to which an engine may add the steps of its warm-up."""
    loaded: Callable[[float], None] = lambda _: None
    """Takes the share of the weights that are in memory. Any thread may call it."""
    link_bytes_per_s: float = 0.0
    """For tests and benches: adapter copies to the device take as long as over a link of that speed; 0: no such link."""


@dataclass(frozen=True, slots=True)
class ProbedKind:
    """The type of activations ("float32", ...), and the quantization of the base's weights ("none" for none)."""

    dtype: str
    quantization: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What never changes of a started engine and its model."""

    limits: WorkerLimits
    """Without what the worker knows: the engine's name and capabilities, and the digests of the base model."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    parse_adapter: Callable[[Path, str], Any]
    """A host copy from a verified blob's file and digest."""
    mechanisms: Mapping[str, Mechanism] = field(default_factory=dict)
    """Those that the start has decided about, by name."""
    slot_bytes: int = 0
    """Device bytes of every adapter's slot; 0 where an adapter takes its own size."""
    probed: ProbedKind | None = None
    """What the readings of adapters depend on; None for an engine that takes none."""
    image: ImageLimits | None = None
    """Of an engine with the capability "draws"."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that has not started, and the facts that are known once it has."""

    engine: EngineProtocol
    facts: Callable[[], Facts]


class OpenEngine(Protocol):
    """The function that opens an engine."""

    def __call__(self, config: WorkerConfig, model_dir: Path, wiring: Wiring) -> Opened:
        """Open the engine. Raises ConfigError for options that it does not support."""


def open_engine(config: WorkerConfig, model_dir: Path, wiring: Wiring) -> Opened:
    """Open the engine that `--engine` names, for the model in `model_dir`. Raises what its function raises."""
    opening: OpenEngine = resolve_name(ENGINES.named(config.engine.engine))
    return opening(config, model_dir, wiring)
