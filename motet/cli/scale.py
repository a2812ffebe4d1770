"""`motet scale`: how many workers there should be, and why; `motet scale follow`: a command that changes it."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
from rich.markup import escape

from motet.cli.client import ApiError
from motet.cli.terminal import as_json_option, ask, connection, print_json, table, terminal
from motet.shared.clock import now_s

COLUMNS = ("base model", "desired", "current", "starting", "needed", "requests/s", "forecast", "start takes")


AGAIN_S = 60.0
"""After a command that has not changed the number of workers."""
CANNOT_RUN = 127
"""The exit status that a shell gives a command which is not there."""


@click.group(invoke_without_command=True)
@connection
@as_json_option
@click.pass_context
def scale(context: click.Context, url: str, as_json: bool) -> None:
    """Show how many workers each base model should have, and why. Nothing is started or stopped.

    \b
      motet scale
      motet scale --json | jq '.scale[].desired'
      motet scale follow -- docker compose up -d --no-recreate --scale worker={desired}
    """
    if context.invoked_subcommand is not None:
        return
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


@scale.command()
@connection
@click.option("--base", help="The base model, where the mesh has several.")
@click.option("--every-s", default=2.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between two looks.")
@click.argument("command", nargs=-1, required=True)
def follow(url: str, base: str | None, every_s: float, command: tuple[str, ...]) -> None:
    """Run COMMAND whenever the number of workers should change, until Ctrl-C.

    {desired}, {current}, {leaves} and {base_model} in COMMAND stand for what `motet scale --json` says. While the gateway
    cannot be asked, or the schedulers are in doubt, nothing is run.

    \b
      motet scale follow -- docker compose up -d --no-recreate --scale worker={desired}
      motet scale follow -- kubectl scale deployment/motet-worker --replicas={desired}
    """
    follower = CommandFollower(command, run_command, click.echo)
    while True:
        follower.look(lambda: _told(url, base), now_s())
        time.sleep(every_s)


def _told(url: str, base: str | None) -> dict[str, Any]:
    """What there is to know of the base model. Raises ApiError, or a UsageError that ends it."""
    found: list[dict[str, Any]] = ask(url, "GET", "/v1/scale")["scale"]
    named = [one for one in found if base in (None, one["base_model"])]
    if len(named) != 1:
        names = ", ".join(one["base_model"] for one in found)
        raise click.UsageError(f"--base: {base or 'not given'}; this mesh serves {names}")
    return named[0]


def run_command(argv: list[str]) -> int:
    """Run a command; its exit status, or `CANNOT_RUN`."""
    try:
        return subprocess.run(argv, check=False).returncode
    except OSError as error:
        click.echo(f"{argv[0]}: {error.strerror}", err=True)
        return CANNOT_RUN


class CommandFollower:
    """Runs a command when the number of workers should change. `run` returns an exit status, `say` tells people."""

    def __init__(self, command: Sequence[str], run: Callable[[list[str]], int], say: Callable[[str], None]) -> None:
        self._command, self._run, self._say = command, run, say
        self._asked = -1  # what the last command was to bring about
        self._rest_until_s = 0.0
        self._silent = False  # the gateway does not answer

    def look(self, told: Callable[[], dict[str, Any]], now_s: float) -> None:
        """Ask, and run the command if it is due. One that was run for the same number is run again after `AGAIN_S`."""
        try:
            one = told()
        except ApiError as error:
            if not self._silent:
                self._say(f"nothing changes: the gateway does not say how many workers there should be ({error})")
            self._silent = True
            return
        self._silent = False
        if one["desired"] == one["current"] or (one["desired"] == self._asked and now_s < self._rest_until_s):
            return
        self._asked, self._rest_until_s = one["desired"], now_s + AGAIN_S
        argv = [_filled(word, one) for word in self._command]
        self._say(f"{one['current']} -> {one['desired']} ({one['reason']}): {shlex.join(argv)}")
        if status := self._run(argv):
            self._say(f"exit status {status}; the next try in {AGAIN_S:g} s")


def _filled(word: str, one: dict[str, Any]) -> str:
    for name in ("desired", "current", "leaves", "base_model"):
        word = word.replace(f"{{{name}}}", str(one[name]))
    return word
