"""`motet rebalance --dry-run`: shows which requests would move between workers, and why."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import click
import orjson
from rich.table import Table

from motet.cli.chat import connection, terminal
from motet.cli.client import Client


@click.command()
@connection
@click.option(
    "--dry-run", is_flag=True, required=True, help="Only show the plan; schedulers with --rebalance on move requests."
)
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
def rebalance(url: str, dry_run: bool, as_json: bool) -> None:
    """Show which requests a scheduler would move to other workers now, whatever its triggers say.

    \b
      motet rebalance --dry-run
    """

    async def ask() -> Any:
        async with Client(url) as client:
            return await client.call("GET", "/v1/status?plan=true")

    answer = asyncio.run(ask())
    if answer["error"]:
        raise click.ClickException(answer["error"])
    if as_json:
        click.echo(orjson.dumps(answer["plans"], option=orjson.OPT_INDENT_2).decode())
    else:
        _print(answer)


def _print(answer: dict[str, Any]) -> None:
    console = terminal()
    if not answer["plans"]:
        console.print(f"scheduler {answer['scheduler_id']}: no base model has two workers that serve")
    for plan in answer["plans"]:
        console.print(
            f"{plan['base_model']}: a request would wait {plan['least_wait_ms']:.0f} to {plan['most_wait_ms']:.0f} ms;"
            f" on {plan['late_workers']} workers longer than an objective"
        )
        if not plan["moves"]:
            console.print("nothing to move: no plan gains enough")
            continue
        console.print(
            f"{len(plan['moves'])} requests would move; the longest running time falls from {plan['before_ms']:.0f} to"
            f" {plan['after_ms']:.0f} ms"
        )
        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in ("from", "to", "adapter", "requests"):
            table.add_column(title, justify="right" if title == "requests" else "left")
        counts = Counter((move["source"], move["to"], move["adapter"]) for move in plan["moves"])
        for (source, to, adapter), count in sorted(counts.items()):
            table.add_row(source, to, adapter[:12] or "base model", str(count))
        console.print(table)
