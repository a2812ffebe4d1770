"""What the commands that ask a gateway share: their options, a request, and its answer on the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Table

from motet.cli.client import Client

PIPE_COLUMNS = 240


def connection(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option for the gateway's URL. The API key comes from MOTET_API_KEY, never from the command line."""
    return click.option(
        "--url",
        default="http://127.0.0.1:8000",
        envvar="MOTET_URL",
        show_default=True,
        help="URL of the gateway, with or without /v1 (or MOTET_URL). MOTET_API_KEY is the API key, MOTET_CA_FILE the"
        " certificate authority.",
    )(command)


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
"""`--json` for scripts."""


def ask(url: str, method: str, path: str, **body: Any) -> Any:
    """The gateway's answer to one request (`Client.call`). Raises ApiError."""

    async def call() -> Any:
        async with Client(url) as client:
            return await client.call(method, path, **body)

    return asyncio.run(call())


def terminal() -> Console:
    """The console for tables: as wide as the terminal, or wide enough for every column in a pipe."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def print_json(value: Any) -> None:
    """Print a server's answer as JSON, for scripts."""
    click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())


def table(*titles: str, right: Collection[str] = (), **how: Any) -> Table:
    """A table without lines; numbers stand in the columns `right`."""
    made = Table(box=None, header_style="bold", pad_edge=False, **how)
    for title in titles:
        made.add_column(title, justify="right" if title in right else "left")
    return made
