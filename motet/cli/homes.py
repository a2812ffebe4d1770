"""`motet homes`: the adapters at home on each worker, and the way of a plan to live workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from motet.cli.terminal import as_json_option, ask, connection, print_json, table, terminal
from motet.cli.workload_options import EXISTING
from motet.shared.json_files import FileError
from motet.shared.plan import read_plan

MOST_NAMES = 8
"""Names of a worker that are printed; `--json` has all."""


@click.command()
@click.argument("plan", type=EXISTING, required=False)
@click.option("--tenant", metavar="NAME", help="Names in the plan mean this tenant's adapters first.")
@connection
@as_json_option
def homes(plan: Path | None, tenant: str | None, url: str, as_json: bool) -> None:
    """Show the adapters at home on each worker; with a PLAN of `motet plan --json`, give live workers those of its workers.

    Each live worker gets the planned one of which it has most loaded. From then on demand moves homes as always.

    \b
      motet homes
      motet plan --from http://localhost:8000 --worker a10.json --json plan.json && motet homes plan.json
    """
    if plan is None:
        answer = ask(url, "GET", "/v1/homes")
    else:
        try:
            planned = read_plan(plan)
        except FileError as error:
            raise click.ClickException(str(error)) from None
        names = [[adapter.name for adapter in worker.adapters if adapter.rank] for worker in planned.workers]
        answer = ask(url, "POST", "/v1/homes", params={"tenant": tenant} if tenant else {}, json={"workers": names})
    if as_json:
        print_json(answer)
    else:
        _print(answer["homes"])


def _print(found: dict[str, list[str]]) -> None:
    shown: Any = table("worker", "at home", "adapters", right=("at home",))
    for worker, names in found.items():
        more = f", and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        shown.add_row(worker, str(len(names)), escape(", ".join(names[:MOST_NAMES]) + more))
    terminal().print(shown)
