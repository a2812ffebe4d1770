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

from motet.cli.client import ApiError, Client
from motet.cli.control import Control
from motet.cli.nats_server import NatsStartError
from motet.cli.progress import Progress
from motet.cli.stack import Stack, StackOptions
from motet.cli.supervisor import StartFailed
from motet.examples.demo import BASE, DEMO
from motet.shared.config import BusConfig, ConfigError
from motet.shared.hub import resolve_model

BUS_FLAGS = tuple(field.name for field in msgspec.structs.fields(BusConfig))


def _directory(**more: Any) -> click.Path:
    return click.Path(file_okay=False, path_type=Path, **more)


@click.command()
@click.option("--model", default="", help="Base model: a local directory in Hugging Face format, or a Hugging Face id.")
@click.option("--demo", is_flag=True, help="Serve the small model and the 16 adapters that come with Motet.")
@click.option("--served-model-name", default="", help="The base model's name in requests.  [default: last part of --model]")
@click.option("--adapters-dir", type=_directory(exists=True), help="Directory of PEFT adapters to register at start.")
@click.option(
    "--adapter-root",
    "adapter_roots",
    multiple=True,
    type=_directory(exists=True),
    help="Directory below which adapters may be registered by server path (repeatable).",
)
@click.option(
    "--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Number of workers; they share the cores."
)
@click.option(
    "--gateways",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Number of gateways, on --port, --port + 1, ...",
)
@click.option("--schedulers", default=1, show_default=True, type=click.IntRange(1, 16), help="Number of schedulers.")
@click.option("--threads", default=0, type=click.IntRange(0), help="CPU threads per worker.  [default: cores / workers]")
@click.option(
    "--quantization",
    default="none",
    show_default=True,
    type=click.Choice(["none", "int8"]),
    help="Base weights in the workers' memory: unquantized, or int8 (CPU only).",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that the gateways listen on.")
@click.option(
    "--api-keys",
    default="auto",
    show_default=True,
    envvar="MOTET_API_KEYS",
    type=click.Choice(["auto", "required", "off"]),
    help="Whether clients need an API key; auto: needed unless --host is a loopback address.",
)
@click.option(
    "--api-keys-file", default="", envvar="MOTET_API_KEYS_FILE", help="File with API keys; see `motet keys create --file`."
)
@click.option(
    "--tls-cert-file", default="", envvar="MOTET_TLS_CERT_FILE", help="TLS certificate of the gateways; enables https."
)
@click.option("--tls-key-file", default="", envvar="MOTET_TLS_KEY_FILE", help="Private key of --tls-cert-file.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port of the first gateway; 0 for any."
)
@click.option(
    "--data-dir",
    default=".motet",
    show_default=True,
    envvar="MOTET_DATA_DIR",
    type=_directory(),
    help="Directory for adapters, durable requests, credentials and logs; kept between runs.",
)
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    default=("default",),
    show_default=True,
    help="Tenant that may publish durable requests over NATS (repeatable).",
)
@click.option("--nats-port", default=0, type=click.IntRange(0, 65535), help="Port of the embedded NATS server.  [default: any]")
@click.option("--nats-url", default="", help="URL of an existing NATS server or cluster, used instead of the embedded one.")
@click.option("--nats-user", default="", help="For --nats-url: one user for all services.")
@click.option("--nats-password-file", default="", help="For --nats-user: the file with its password.")
@click.option("--nats-creds", default="", help="For --nats-url: a .creds file for all services.")
@click.option("--nats-tls-ca-file", default="", help="For --nats-url: the server's certificate authority, for TLS.")
@click.option("--nats-tls-cert-file", default="", help="For --nats-url: a client certificate, if the server asks for one.")
@click.option("--nats-tls-key-file", default="", help="For --nats-url: private key of --nats-tls-cert-file.")
@click.option(
    "--nats-replicas", default=1, type=click.IntRange(1, 5), help="For a NATS cluster: replicas of streams and buckets."
)
@click.option(
    "--credentials",
    "credentials_dir",
    type=_directory(exists=True),
    help="For --nats-url: directory with one password file per service, from `motet nats-config`.",
)
@click.option(
    "--drain-s",
    default=20.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds that running requests get when the mesh stops.",
)
@click.option("--verbose", is_flag=True, help="Also print the services' logs here.")
def up(verbose: bool, **given: Any) -> None:
    """Start the whole mesh on this machine and keep it running until Ctrl-C.

    NATS and every service run in processes of their own; one that crashes is restarted. Ctrl-C (or SIGTERM) lets running
    requests finish; a second Ctrl-C stops at once.

    \b
      motet up --demo
      motet up --model Qwen/Qwen3-0.6B --workers 2
      motet up --model ./llama --nats-url nats://bus:4222 --credentials ./secrets

    Other options of the services (see `motet worker --help`) are set by their environment variables:

    \b
      MOTET_MAX_RUNNING=128 motet up --model ...
    """
    try:
        options = stack_options(**given)
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    sys.exit(asyncio.run(run(options, verbose=verbose)))


def stack_options(model: str, demo: bool, served_model_name: str, nats_url: str, **given: Any) -> StackOptions:
    """The options of a stack from the flags of `motet up`; downloads a model given by its hub id. Raises ConfigError."""
    if demo == bool(model):
        raise ConfigError("--model or --demo: one of them says what to serve")
    if demo:
        model, served_model_name = str(DEMO / "model"), served_model_name or BASE
        given["adapters_dir"] = given.get("adapters_dir") or DEMO / "adapters"
    bus_flags = {name: given.pop(name) for name in BUS_FLAGS if name in given}
    if not nats_url and (any(bus_flags[name] for name in bus_flags if name != "nats_replicas") or given.get("credentials_dir")):
        raise ConfigError("--nats-user, --nats-creds, --nats-tls-... and --credentials need --nats-url")
    given["adapters_dir"] = str(Path(given["adapters_dir"]).resolve()) if given.get("adapters_dir") else ""
    given["adapter_roots"] = tuple(str(Path(root).resolve()) for root in given.get("adapter_roots", ()))
    return StackOptions(
        model=str(Path(resolve_model(model)).resolve()),
        served_model_name=served_model_name or Path(model.rstrip("/")).name,
        bus=BusConfig(nats_url=nats_url, **bus_flags) if nats_url else None,
        **given,
    )


async def run(options: StackOptions, *, verbose: bool = False) -> int:
    """Run a stack until a signal or a failure; returns the exit status."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    progress = Progress()
    stack = Stack(options, progress, echo=_echo if verbose else None)
    control = Control(stack.data_dir, {"restart": stack.restart})

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
            progress.line(await summary(stack))
            await _or_told(stack.failed(), told)
        progress.line("draining; Ctrl-C again to stop at once")
        return 0
    except (ConfigError, NatsStartError, StartFailed) as error:
        progress.line(f"motet up: {error}")
        return 1
    finally:
        control.stop()
        await stack.stop()
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


async def summary(stack: Stack) -> str:
    """Text shown after the start: the URL, and a command to try."""
    options, url = stack.options, stack.urls[0]
    base, adapters, shown = options.served_model_name, [], ""
    with contextlib.suppress(ApiError):  # it may ask for a key that we do not have
        async with Client(url) as client:
            adapters = [card["id"] for card in await client.models() if card.get("parent")]
            shown = f" with {len(adapters)} adapters"
    more = (" --cacert CA_FILE" if options.tls_cert_file else "") + (
        "" if options.keyless else ' -H "Authorization: Bearer $MOTET_API_KEY"'
    )
    keyless = "\n  No API keys: everybody who reaches this address is an administrator.\n" if options.keyless else ""
    model = "upper-case" if "upper-case" in adapters else min(adapters, default=base)
    body = {"model": model, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 64, "stream": True}
    return f"""ready: {base}{shown}

  {url}/v1

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{more} \\
    -d {shlex.quote(json.dumps(body))}
{keyless}
  NATS {stack.nats_url} (user upstream, password in {stack.credentials_dir / "upstream.password"})
  logs in {stack.data_dir / "logs"}; Ctrl-C drains and stops.
"""
