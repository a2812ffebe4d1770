"""`motet chat` and `motet complete`: print an answer on the terminal while it is generated."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import click

from motet.cli.client import Client
from motet.cli.terminal import connection, print_json
from motet.shared.clock import now_s


def sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that both commands share."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON instead of streaming it."),
        click.option("--seed", type=int, help="Seed that makes a sampled answer repeatable."),
        click.option(
            "--temperature",
            default=0.0,
            show_default=True,
            type=click.FloatRange(0, 2),
            help="Sampling temperature; 0: greedy.",
        ),
        click.option(
            "--max-tokens", default=256, show_default=True, type=click.IntRange(1), help="Maximum tokens of the answer."
        ),
        click.option("--model", default="", help="An adapter, the base model, or base:adapter.  [default: the base model]"),
        connection,
    ):
        command = option(command)
    return command


@click.command()
@sampling
@click.option("--system", default="", help="A system message.")
@click.argument("message", required=False)
def chat(message: str | None, system: str, as_json: bool, url: str, **settings: Any) -> None:
    """Chat with an adapter or the base model.

    With MESSAGE, print the answer and exit. Without it, hold a conversation line by line: /new starts over, Ctrl-D ends.

    \b
      motet chat --model upper-case "hello there"
      motet chat --system "Answer in one word."
      motet chat --model rot13 --json "hello there" | jq -r .choices[0].message.content
    """
    system_turn = [{"role": "system", "content": system}] if system else []

    async def say(turns: list[dict[str, str]]) -> str:
        async with Client(url) as client:
            return await _turn(client, await _body(client, settings), turns, as_json)

    if message is not None:
        asyncio.run(say([*system_turn, {"role": "user", "content": message}]))
        return
    turns = list(system_turn)
    for line in _lines(f"{settings['model'] or 'base model'}> "):
        if line == "/new":
            turns = list(system_turn)
        elif line:
            turns.append({"role": "user", "content": line})
            turns.append({"role": "assistant", "content": asyncio.run(say(turns))})


@click.command()
@sampling
@click.argument("prompt")
def complete(prompt: str, as_json: bool, url: str, **settings: Any) -> None:
    """Complete PROMPT, taken as it is (no chat template).

    \b
      motet complete "Once upon a time"
      motet complete --model upper-case "hello there"$'\\n'
    """

    async def talk() -> None:
        async with Client(url) as client:
            body = await _body(client, settings) | {"prompt": prompt}
            if as_json:
                print_json(await client.call("POST", "/v1/completions", json=body))
            else:
                await _show(client.events("/v1/completions", body), lambda choice: choice.get("text"))

    asyncio.run(talk())


async def _body(client: Client, settings: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in settings.items() if value not in (None, "")}
    if "model" not in body:
        body["model"] = next(card["id"] for card in await client.models() if not card.get("parent"))
    return body


async def _turn(client: Client, body: dict[str, Any], messages: list[dict[str, str]], as_json: bool) -> str:
    path, body = "/v1/chat/completions", body | {"messages": messages}
    if not as_json:
        return await _show(client.events(path, body), lambda choice: choice["delta"].get("content"))
    answer = await client.call("POST", path, json=body)
    print_json(answer)
    return str(answer["choices"][0]["message"]["content"])


async def _show(events: AsyncIterator[dict[str, Any]], text_of: Callable[[dict[str, Any]], str | None]) -> str:
    """Print the pieces as they arrive, on a terminal also their speed. Returns the whole text."""
    began, first_at, pieces = now_s(), 0.0, []
    async for event in events:
        for choice in event["choices"]:
            if piece := text_of(choice):
                first_at = first_at or now_s()
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if sys.stderr.isatty() and first_at:
        click.echo(
            click.style(f"first token {1000 * (first_at - began):.0f} ms, all {now_s() - began:.2f} s", dim=True), err=True
        )
    return "".join(pieces)


def _lines(prompt: str) -> Iterator[str]:
    """Lines of the standard input until it ends; on a terminal with a prompt and line editing."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401 - gives `input` its editing keys

    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
