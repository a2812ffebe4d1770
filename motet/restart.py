"""`motet restart`: every process of a running stack replaced, one after the other, while requests run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from motet.control import order


@click.command()
@click.option(
    "--data-dir",
    default=".motet",
    show_default=True,
    envvar="MOTET_DATA_DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The data directory of the stack, as given to `motet up`.",
)
def restart(data_dir: Path) -> None:
    """Restart every process of a stack that `motet up` runs, without an error for anybody.

    Each process gets a successor that starts beside it, takes over when it is ready, and only then the old one drains: after
    an upgrade of the installed code this is how it comes into use. A successor that cannot start is given up, and its
    predecessor stays. Options of the stack stay as they were given to `motet up`.

    \b
      pip install --upgrade motet && motet restart
    """
    try:
        problem = asyncio.run(order(data_dir.resolve(), "restart", click.echo))
    except OSError:
        raise click.ClickException(f"no stack runs in {data_dir.resolve()}; see --data-dir") from None
    if problem:
        raise click.ClickException(problem)
    click.echo("everything is restarted")
