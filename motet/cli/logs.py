"""`motet logs`: prints what the processes of `motet up` have logged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click

from motet.cli.process import tail
from motet.cli.restart import data_dir_option

POLL_S = 0.2


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines until Ctrl-C.")
@click.option("--lines", "-n", default=50, show_default=True, type=click.IntRange(0, 1000), help="Last lines of each log.")
@data_dir_option
@click.argument("service", required=False)
def logs(service: str | None, follow: bool, lines: int, data_dir: Path) -> None:
    """Print the last log lines of SERVICE, or of every process of `motet up`.

    SERVICE is a process, such as worker-1, or a kind of them, such as worker.

    \b
      motet logs
      motet logs registry
      motet logs worker -f
    """
    found = sorted((data_dir / "logs").glob("*.log"))
    if not found:
        raise click.ClickException(f"no logs in {(data_dir / 'logs').resolve()}; see --data-dir")
    chosen = [path for path in found if service is None or path.stem == service or path.stem.rsplit("-", 1)[0] == service]
    if not chosen:
        raise click.UsageError(f"no log of {service!r}; there are: {', '.join(path.stem for path in found)}")
    width = max(len(path.stem) for path in chosen)
    sizes = {path: path.stat().st_size for path in chosen}
    for path in chosen:
        for line in tail(path, lines).splitlines() if lines else ():
            _say(path, line, width, alone=len(chosen) == 1)
    while follow:
        time.sleep(POLL_S)
        for path in chosen:
            for line in _news(path, sizes):
                _say(path, line, width, alone=len(chosen) == 1)


def _news(path: Path, sizes: dict[Path, int]) -> Iterator[str]:
    """The complete lines that have come since the last look. A log that was begun anew is read from its begin."""
    try:
        with path.open("rb") as source:
            if path.stat().st_size < sizes[path]:
                sizes[path] = 0
            source.seek(sizes[path])
            whole, newline, _ = source.read().rpartition(b"\n")
    except OSError:
        return
    sizes[path] += len(whole) + len(newline)
    yield from whole.decode(errors="replace").splitlines()


def _say(path: Path, line: str, width: int, *, alone: bool) -> None:
    click.echo(line if alone else f"{path.stem:<{width}} | {line}")
