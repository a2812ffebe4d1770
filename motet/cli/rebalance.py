"""`motet rebalance --dry-run`: shows which requests would move between workers, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from motet.cli.terminal import as_json_option, ask, connection, print_json, table, terminal


@click.command()
@connection
@click.option(
    "--dry-run", is_flag=True, required=True, help="Only show the plan; schedulers with --rebalance on move requests."
)
@as_json_option
def rebalance(url: str, dry_run: bool, as_json: bool) -> None:
    """Show which requests a scheduler would move to other workers now, whatever its triggers say.

    \b
      motet rebalance --dry-run
    """

    answer = ask(url, "GET", "/v1/status?plan=true")
    if answer["error"]:
        raise click.ClickException(answer["error"])
    if as_json:
        print_json(answer["plans"])
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
        moves = table("from", "to", "adapter", "requests", right=("requests",))
        counts = Counter((move["source"], move["to"], move["adapter"]) for move in plan["moves"])
        for (source, to, adapter), count in sorted(counts.items()):
            moves.add_row(source, to, adapter[:12] or "base model", str(count))
        console.print(moves)
