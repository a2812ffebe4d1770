"""`motet up`: starts the whole mesh on this machine and supervises it until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from motet.cli.control import ControlSocket
from motet.cli.follow import followed
from motet.cli.nats_server import NatsStartError
from motet.cli.progress import Progress
from motet.cli.stack import Stack, StackOptions
from motet.cli.status import counted, kernel_lines, refused_lines
from motet.cli.supervisor import CONFIG_ERROR_EXIT as EXIT_CONFIG
from motet.cli.supervisor import StartFailed
from motet.cli.up_options import UpCommand, stack_options
from motet.shared import subjects
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.bus import Bus
from motet.shared.config import ConfigError
from motet.shared.errors import MotetError
from motet.shared.tenancy import SHARED
from motet.shared.wire.admin import ClusterStatus, StatusReply, StatusRequest

STATUS_S = 2.0


@click.command(cls=UpCommand)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="YAML file with options, as `max-running: 128`; flags and variables go before it.",
)
@click.option("--verbose", is_flag=True, help="Also print the services' logs here.")
def up(verbose: bool, **given: Any) -> None:
    """Start the whole mesh on this machine and keep it running until Ctrl-C.

    NATS and every service run in processes of their own; one that crashes is restarted. Ctrl-C (or SIGTERM) lets running
    requests finish; a second Ctrl-C stops at once.

    \b
      motet up --demo
      motet up --model Qwen/Qwen3-0.6B --adapters-dir ./adapters
      motet up --config motet.yaml
      motet up --model ./llama --nats-url nats://bus:4222 --credentials ./secrets

    Every option is also an environment variable: --max-running is MOTET_MAX_RUNNING.
    """
    try:
        options = stack_options(given)
    except (ConfigError, ValueError) as error:
        click.echo(f"motet up: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    sys.exit(asyncio.run(run(options, verbose=verbose)))


async def run(options: StackOptions, *, verbose: bool = False) -> int:
    """Run a stack until a signal or a failure; returns the exit status."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    progress = Progress()
    stack = Stack(options, progress, echo=_echo if verbose else None)
    control = ControlSocket(stack.data_dir, {"restart": stack.restart})

    def on_signal() -> None:
        if told.is_set():
            progress.line("stopping now")
            stack.hurry()
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        async with progress:
            progress.expect(stack.names())
            await _or_told(stack.start(), told)
        if not told.is_set():
            await control.start()
            for note in options.notes:
                progress.line(f"note on --model: {note}")
            if options.chats_missing:
                progress.line(f"chats cannot be served: {options.chats_missing}")
            progress.line(await summary(stack))
            await _or_told(followed(stack, progress.line), told)
        progress.line("draining; Ctrl-C again to stop at once" if stack.ready else "stopping before the start is complete")
        return 0
    except (ConfigError, NatsStartError, StartFailed) as error:
        progress.silent = True
        progress.line(f"motet up: {error}")
        return 1
    finally:
        control.stop()
        await stack.stop()
        if not progress.silent:
            progress.line("stopped")


async def _or_told(work: Any, told: asyncio.Event) -> None:
    """Wait for `work` or the signal, whichever comes first. Raises what `work` raises."""
    working, waiting = asyncio.ensure_future(work), asyncio.create_task(told.wait())
    done, _ = await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if working not in done:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
    else:
        await working


def _echo(name: str, data: bytes) -> None:
    for line in data.decode(errors="replace").splitlines():
        print(f"{name:<12} | {line}", file=sys.stderr, flush=True)


async def _facts(stack: Stack) -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
    """The names that all tenants share, the refused adapters, and the workers. Asks NATS, since the gateway may want a key."""
    async with contextlib.AsyncExitStack() as closing:
        bus = await Bus.connect(stack.bus_config("gateway"), "motet-up", inbox="gateway")
        closing.push_async_callback(bus.close)
        watch = AdapterWatch(bus)
        await watch.start()
        closing.push_async_callback(watch.stop)
        reply = await bus.request(subjects.SCHEDULER_STATUS, StatusRequest(), StatusReply, timeout_s=STATUS_S)
        workers = msgspec.to_builtins(reply.workers) if isinstance(reply, ClusterStatus) else []
        return [info.entry.name for info in watch.visible(SHARED)], msgspec.to_builtins(watch.refused), workers


async def summary(stack: Stack) -> str:
    """Text shown after the start: the URL, and a command to try."""
    options, url = stack.options, stack.urls[0]
    base, shown, refused = options.served_model_name, "", ""
    adapters: list[str] = []
    with contextlib.suppress(MotetError):
        adapters, bad, workers = await _facts(stack)
        shown = f" with {counted(len(adapters), 'adapter')}"
        refused = "".join(f"\n{line}" for line in [*kernel_lines(workers), *refused_lines(bad)])
    more = (" --cacert CA_FILE" if options.tls_cert_file else "") + (
        "" if options.keyless else ' -H "Authorization: Bearer $MOTET_API_KEY"'
    )
    keyless = "\n  No API keys: everybody who reaches this address is an administrator.\n" if options.keyless else ""
    model = "upper-case" if "upper-case" in adapters else min(adapters, default=base)
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello there"}]}
    path = "chat/completions"
    if options.chats_missing:
        asked, path = {"prompt": "hello there"}, "completions"
    body = {"model": model, **asked, "max_tokens": 64, "stream": True}
    if options.draws:
        model = "invert" if "invert" in adapters else model
        path, body = "images/generations", {"model": model, "prompt": "a red circle on sky", "response_format": "url"}
    return f"""ready: {base}{shown}{refused}

  {url}/v1

  curl -N {url}/v1/{path} -H 'Content-Type: application/json'{more} \\
    -d {shlex.quote(json.dumps(body))}
{keyless}
  NATS {stack.nats_url} (user upstream, password in {stack.credentials_dir / "upstream.password"})
  logs in {stack.data_dir / "logs"}; Ctrl-C drains and stops.
"""
