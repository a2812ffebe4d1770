"""`motet profile`: measures step times of a worker, fits the schedulers' models to them, and writes a profile."""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from msgspec.structs import asdict, replace
from rich.progress import Progress
from rich.table import Table

from motet.cli.nats_server import NatsServer, NatsStartError
from motet.cli.options import takes
from motet.cli.profile_images import image_profile, image_table
from motet.cli.terminal import table, terminal
from motet.policies.times.perf_fit import Fitted, fit, fit_link
from motet.policies.times.step_fit import fit_steps, undisturbed
from motet.services.worker.config import WorkerConfig
from motet.shared.bus import Bus
from motet.shared.config import BusConfig, ConfigError, load
from motet.shared.errors import MotetError
from motet.shared.hub import resolve_model
from motet.shared.image_shapes import is_image_base
from motet.shared.model import EngineSteps, PerfModel
from motet.shared.profile import VERSION, FitFacts, Hops, Profile, Steps, StorageTimes, write_profile
from motet.shared.provision import provision

if TYPE_CHECKING:
    from motet.services.worker.profiling import Measured

T = TypeVar("T")
GOOD_R2 = 0.96  # CaraServe, section 5


@click.command()
@takes(WorkerConfig, "model")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="profile.json",
    show_default=True,
    help="File to write.",
)
@click.option("--seconds", type=click.FloatRange(1, 3600), default=60.0, show_default=True, help="Approximate duration.")
@takes(WorkerConfig, "plugins")
@takes(WorkerConfig, "engine")
@takes(WorkerConfig, "engine_args")
@takes(WorkerConfig, "device")
@takes(WorkerConfig, "threads")
@takes(WorkerConfig, "max_running")
@takes(WorkerConfig, "max_step_tokens")
@takes(WorkerConfig, "kv_memory_gib")
@takes(WorkerConfig, "lora_memory_mib")
@takes(WorkerConfig, "max_loras")
def profile(out: Path, seconds: float, **options: object) -> None:
    """Measure a worker on this machine and write its profile: limits, step times, adapter copies and network hops.

    Nothing else should run meanwhile. `motet worker` with the same engine and `motet simulate` take the file as `--profile`.
    Worker options that are not listed here are read from their variables.

    \b
      motet profile --model examples/demo/model --out worker.json
      motet simulate --profile worker.json --workers 8 --rate 40
      motet profile --engine vllm --engine-args '--tensor-parallel-size 2' --model ./model --out vllm.json
    """
    console = terminal()
    logging.getLogger("motet").setLevel(logging.ERROR)  # hide the worker's messages
    try:
        config = load(WorkerConfig, options)
        model_dir = resolve_model(config.base.model)
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("measuring", total=1.0)

            def progress(share: float) -> None:
                bar.update(task, completed=share)

            if is_image_base(model_dir):
                shown = asyncio.run(on_private_nats(config, partial(_measure_images, model_dir, seconds, progress)))
                write_profile(out, shown)
                console.print(image_table(shown))
                console.print(f"written to {out}")
                return
            measured = asyncio.run(on_private_nats(config, partial(_measure, model_dir, seconds, progress)))
        steps = undisturbed(measured.steps)
        fitted = fit(steps, measured.loads)
        fine = fit_steps(steps) if measured.limits.engine == "native" else None  # vLLM's records lack most that it is fitted to
        store, disk = fit_link(measured.store), fit_link(measured.disk)
    except (ConfigError, MotetError, NatsStartError, ValueError) as error:
        click.echo(f"motet profile: {error}", err=True)
        sys.exit(2)
    perf = replace(fitted.perf, fetch_base_ms=store[0], fetch_ms_per_mib=store[1])
    write_profile(
        out,
        Profile(
            motet_profile=VERSION,
            name=f"{measured.limits.base_model} on {measured.limits.device}",
            limits=measured.limits,
            perf=perf,
            fit=FitFacts(r2_prefill=fitted.r2_prefill, r2_decode=fitted.r2_decode, steps=len(steps)),
            steps=Steps(context_token_ms=fitted.context_token_ms),
            engine_steps=fine,
            engine=config.options,
            storage=StorageTimes.of(config.adapters.host_cache_mib, config.adapters.disk_cache_mib, disk=disk, store=store),
            hops=Hops(assign_ms=statistics.median(measured.assign_ms), frame_ms=statistics.median(measured.frame_ms)),
            merge=measured.merge,
            link=measured.link,
        ),
    )
    console.print(_table(perf, fitted, fine, f"{len(steps)} of {len(measured.steps)}"))
    for phase, r2 in (("prefill", fitted.r2_prefill), ("decode", fitted.r2_decode)):
        if r2 < GOOD_R2:
            console.print(f"[yellow]R2 of {phase} is {r2:.3f}, below {GOOD_R2}: was something else running?[/]")
    console.print(f"written to {out}")


async def on_private_nats(config: WorkerConfig, measure: Callable[[WorkerConfig], Awaitable[T]]) -> T:
    """What `measure` finds with a NATS server of its own, which has Motet's buckets."""
    with tempfile.TemporaryDirectory(prefix="motet-profile-") as directory:
        nats = NatsServer(Path(directory))
        url = await nats.start()
        try:
            bus = await Bus.connect(BusConfig(nats_url=url), "profile")
            await provision(bus)
            await bus.close()
            return await measure(replace(config, bus=BusConfig(nats_url=url)))
        finally:
            nats.stop()


async def _measure(model_dir: Path, seconds: float, progress: Callable[[float], None], config: WorkerConfig) -> Measured:
    from motet.services.worker.profiling import measure

    return await measure(config, model_dir, seconds=seconds, progress=progress)


async def _measure_images(model_dir: Path, seconds: float, progress: Callable[[float], None], config: WorkerConfig) -> Profile:
    from motet.services.worker.image_profiling import measure_images

    return image_profile(await measure_images(config, model_dir, seconds=seconds, progress=progress), config)


def _table(perf: PerfModel, fitted: Fitted, fine: EngineSteps | None, counted: str) -> Table:
    shown = table("coefficient", "ms", right=("ms",), title=f"{counted} steps, kernel model {perf.kernel}")
    for name, value in asdict(perf).items():
        if isinstance(value, float):
            shown.add_row(name, f"{value:.5f}")
    shown.add_row("context_token_ms", f"{fitted.context_token_ms:.6f}")
    shown.add_row("R2 prefill", f"{fitted.r2_prefill:.4f}")
    shown.add_row("R2 decode", f"{fitted.r2_decode:.4f}")
    if fine is not None:
        shown.add_row("R2 of what is simulated", f"{fine.r2:.4f}")
    return shown
