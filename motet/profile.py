"""`motet profile`: measure how long an engine's steps take, fit the schedulers' models to them, write a profile."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich.progress import Progress
from rich.table import Table

from motet.talk import terminal
from policies.perf_fit import Fitted, fit
from shared.config import ConfigError, load
from shared.hub import resolve_model
from shared.profile import VERSION, EngineFacts, FitFacts, Profile, Steps, write_profile

GOOD_R2 = 0.96  # CaraServe, section 5


@click.command()
@click.option("--model", required=True, help="Base model: a local directory or a Hugging Face id.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="profile.json", show_default=True, help="File.")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=60.0, show_default=True, help="For about so long.")
@click.option("--device", default=None, help="As for `motet worker`: auto, cpu, cuda, cuda:<n>.")
@click.option("--threads", type=int, default=None, help="As for `motet worker`.")
@click.option("--max-running", type=int, default=None, help="As for `motet worker`.")
@click.option("--max-step-tokens", type=int, default=None, help="As for `motet worker`.")
@click.option("--kv-memory-gib", type=float, default=None, help="As for `motet worker`.")
@click.option("--lora-memory-mib", type=int, default=None, help="As for `motet worker`.")
@click.option("--max-loras", type=int, default=None, help="As for `motet worker`.")
def profile(model: str, out: Path, seconds: float, **options: object) -> None:
    """Measure a worker's engine on this machine and write what schedulers and the simulator need to know of it.

    Nothing else should run meanwhile. Workers take the file as `--profile`, `motet simulate` too; other options are read
    from MOTET_* variables, as a worker does.

    \b
      motet profile --model examples/demo/model --out worker.json
      motet simulate --profile worker.json --workers 8 --rate 40
    """
    from services.worker.config import WorkerConfig
    from services.worker.profiling import measure

    console = terminal()
    try:
        config = load(WorkerConfig, {"model": model, **options})
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("measuring", total=1.0)
            measured = measure(
                config, resolve_model(model), seconds=seconds, progress=lambda share: bar.update(task, completed=share)
            )
        fitted = fit(measured.steps, measured.loads)
    except (ConfigError, ValueError) as error:
        click.echo(f"motet profile: {error}", err=True)
        sys.exit(2)
    facts = FitFacts(r2_prefill=fitted.r2_prefill, r2_decode=fitted.r2_decode, steps=len(measured.steps))
    write_profile(
        out,
        Profile(
            motet_profile=VERSION,
            name=f"{measured.limits.base_model} on {measured.limits.device}",
            limits=measured.limits,
            perf=fitted.perf,
            fit=facts,
            steps=Steps(context_token_ms=fitted.context_token_ms),
            engine=EngineFacts(
                max_step_tokens=config.max_step_tokens, max_loras=config.max_loras, prefix_cache=config.prefix_cache
            ),
        ),
    )
    console.print(_table(fitted, len(measured.steps)))
    for phase, r2 in (("prefill", fitted.r2_prefill), ("decode", fitted.r2_decode)):
        if r2 < GOOD_R2:
            console.print(f"[yellow]R2 of {phase} is {r2:.3f}, below {GOOD_R2}: was something else running?[/]")
    console.print(f"written to {out}")


def _table(fitted: Fitted, steps: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title=f"{steps} steps, kernel model {fitted.perf.kernel}")
    table.add_column("coefficient")
    table.add_column("ms", justify="right")
    for name, value in msgspec.structs.asdict(fitted.perf).items():
        if isinstance(value, float):
            table.add_row(name, f"{value:.5f}")
    table.add_row("context_token_ms", f"{fitted.context_token_ms:.6f}")
    table.add_row("R2 prefill", f"{fitted.r2_prefill:.4f}")
    table.add_row("R2 decode", f"{fitted.r2_decode:.4f}")
    return table
