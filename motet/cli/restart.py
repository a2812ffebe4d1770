"""`motet restart`: replaces every process of a running stack, one after the other, while requests run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from motet.cli.control import order

data_dir_option = click.option(
    "--data-dir",
    default=".motet",
    show_default=True,
    envvar="MOTET_DATA_DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The data directory of the stack, as given to `motet up`.",
)


@click.command()
@data_dir_option
def restart(data_dir: Path) -> None:
    """Replace every process of a stack that `motet up` runs, without errors for clients.

    Each process gets a successor that starts beside it. When the successor is ready, the old process drains. Use this command
    to start running a newly installed version. If a successor cannot start, the old process stays. Options stay as given to
    `motet up`.

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
