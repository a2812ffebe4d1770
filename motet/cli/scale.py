"""`motet scale`: how many workers there should be, and why."""

from __future__ import annotations

from typing import Any

import click
from rich.markup import escape

from motet.cli.terminal import as_json_option, ask, connection, print_json, table, terminal

COLUMNS = ("base model", "desired", "current", "starting", "needed", "requests/s", "forecast", "start takes")


@click.command()
@connection
@as_json_option
def scale(url: str, as_json: bool) -> None:
    """Show how many workers each base model should have, and why. Nothing is started or stopped.

    \b
      motet scale
      motet scale --json | jq '.scale[].desired'
    """

    answer = ask(url, "GET", "/v1/scale")
    if as_json:
        print_json(answer)
    else:
        _print(answer["scale"])


def _print(found: list[dict[str, Any]]) -> None:
    console, shown = terminal(), table(*COLUMNS, right=COLUMNS[1:])
    for one in found:
        counts = (str(one[name]) for name in ("desired", "current", "starting", "needed"))
        rates = f"{one['requests_s']:.3g}", f"{one['forecast_requests_s']:.3g}", f"{one['lead_s']:.0f} s"
        shown.add_row(one["base_model"], *counts, *rates)
    console.print(shown)
    for one in found:
        console.print(escape(f"{one['base_model']}: {one['reason']} ({one['why']})"), highlight=False)
        if one["overdue"]:
            console.print(
                f"[yellow]not counted, starting for too long:[/] {escape(', '.join(one['overdue']))}", highlight=False
            )
