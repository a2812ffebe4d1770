"""`motet up`: starts the whole mesh on this machine and supervises it until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from motet.cli.control import ControlSocket
from motet.cli.nats_server import NatsStartError
from motet.cli.options import takes
from motet.cli.progress import Progress
from motet.cli.stack import Stack, StackOptions
from motet.cli.status import counted, refused_lines
from motet.cli.supervisor import StartFailed
from motet.examples.demo import BASE, DEMO
from motet.services.gateway.config import HttpConfig, KeysConfig
from motet.services.registry.config import PublishersConfig, SourcesConfig
from motet.services.worker.config import WorkerEngineConfig
from motet.shared.adapter_watch import AdapterWatch
from motet.shared.bus import Bus
from motet.shared.config import BaseModelConfig, BusConfig, Config, ConfigError, ProcessConfig, field, fields, load
from motet.shared.errors import MotetError
from motet.shared.hub import resolve_model
from motet.shared.tenancy import SHARED

OWN = ("workers", "gateways", "schedulers", "data_dir", "nats_port", "credentials_dir")
"""Options of `motet up` that are no service's."""


def _directory(**more: Any) -> click.Path:
    return click.Path(file_okay=False, path_type=Path, **more)


class UpConfig(Config, frozen=True, kw_only=True):
    """Options of services that `motet up` takes itself. Services read all others from their variables."""

    base: BaseModelConfig
    bus: BusConfig = BusConfig()
    process: ProcessConfig = ProcessConfig()
    sources: SourcesConfig = SourcesConfig()
    publishers: PublishersConfig = PublishersConfig()
    http: HttpConfig = HttpConfig()
    keys: KeysConfig = KeysConfig()
    engine: WorkerEngineConfig = WorkerEngineConfig()


_takes = partial(takes, UpConfig)


@click.command()
@_takes("model", "Base model: a local directory in Hugging Face format, or a Hugging Face id.")
@click.option("--demo", is_flag=True, help="Serve the small model and the 16 adapters that come with Motet.")
@_takes("served_model_name")
@_takes("adapters_dir")
@_takes("adapter_roots")
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
@_takes("threads", "CPU threads per worker; 0: cores / workers.  [default: 0]")
@_takes("quantization")
@_takes("engine")
@_takes("engine_args")
@_takes("host")
@_takes("port", "Port of the first gateway; 0 for any.  [default: 8000]")
@_takes("api_keys")
@_takes("api_keys_file")
@_takes("tls_cert_file")
@_takes("tls_key_file")
@click.option(
    "--data-dir",
    default=".motet",
    show_default=True,
    envvar="MOTET_DATA_DIR",
    type=_directory(),
    help="Directory for adapters, durable requests, credentials and logs; kept between runs.",
)
@_takes("tenants")
@click.option("--nats-port", default=0, type=click.IntRange(0, 65535), help="Port of the embedded NATS server.  [default: any]")
@_takes("nats_url", "URL of an existing NATS server or cluster, used instead of the embedded one.")
@_takes("nats_user", "For --nats-url: one user for all services.")
@_takes("nats_password_file", "For --nats-user: the file with its password.")
@_takes("nats_tls_ca_file", "For --nats-url: the server's certificate authority, for TLS.")
@_takes("nats_tls_cert_file", "For --nats-url: a client certificate, if the server asks for one.")
@_takes("nats_tls_key_file", "For --nats-url: private key of --nats-tls-cert-file.")
@_takes("nats_replicas", "For a NATS cluster: replicas of streams and buckets.  [default: 1]")
@click.option(
    "--credentials",
    "credentials_dir",
    type=_directory(exists=True),
    help="For --nats-url: directory with one password file per service, from `motet nats-config`.",
)
@_takes("drain_s", "Seconds that running requests get when the mesh stops.  [default: 20]")
@click.option("--verbose", is_flag=True, help="Also print the services' logs here.")
def up(verbose: bool, **given: Any) -> None:
    """Start the whole mesh on this machine and keep it running until Ctrl-C.

    NATS and every service run in processes of their own; one that crashes is restarted. Ctrl-C (or SIGTERM) lets running
    requests finish; a second Ctrl-C stops at once.

    \b
      motet up --demo
      motet up --model Qwen/Qwen3-0.6B --workers 2
      motet up --model ./llama --nats-url nats://bus:4222 --credentials ./secrets

    An option that is not given here is read from its variable, also one that is not listed (see `motet worker --help`):

    \b
      MOTET_MAX_RUNNING=128 motet up --model ...
    """
    try:
        options = stack_options(given)
    except (ConfigError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    sys.exit(asyncio.run(run(options, verbose=verbose)))


def stack_options(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> StackOptions:
    """The options of a stack from the flags of `motet up`, None where not given, and from variables.

    Downloads a model that is given by its hub id. Raises ConfigError.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    named = {option.name for option in fields(UpConfig)}
    taken = {name: value for name, value in flags.items() if name in named}
    own = {name: flags[name] for name in OWN if name in flags}
    if flags.get("demo"):
        if "model" in taken:
            raise ConfigError("--model and --demo: each says what to serve, give one of them")
        demo = {"model": str(DEMO / "model"), "served_model_name": BASE, "adapters_dir": str(DEMO / "adapters")}
        taken = demo | taken
    elif "model" not in taken and field(UpConfig, "model").variable not in environ:
        raise ConfigError("--model or --demo: one of them says what to serve")
    config = load(UpConfig, taken, environ)
    elsewhere = "nats_url" in taken or field(UpConfig, "nats_url").variable in environ
    if not elsewhere and ("credentials_dir" in own or any(name.startswith("nats_") for name in taken)):
        raise ConfigError("--nats-user, --nats-tls-... and --credentials need --nats-url")
    adapters_dir = config.sources.adapters_dir
    if adapters_dir and not Path(adapters_dir).is_dir():
        raise ConfigError(f"--adapters-dir: there is no directory {adapters_dir}")
    return StackOptions(
        model=str(Path(resolve_model(config.base.model)).resolve()),
        served_model_name=config.base.name,
        adapters_dir=str(Path(adapters_dir).resolve()) if adapters_dir else "",
        adapter_roots=config.sources.roots,
        tenants=config.publishers.names,
        bus=config.bus if elsewhere else None,
        threads=config.engine.threads,
        host=config.http.host,
        port=config.http.port,
        tls_cert_file=config.http.tls_cert_file,
        tls_key_file=config.http.tls_key_file,
        api_keys=config.keys.api_keys,
        api_keys_file=config.keys.api_keys_file,
        drain_s=config.process.drain_s,
        quantization=taken.get("quantization", ""),  # else the workers read its variable
        engine=taken.get("engine", ""),
        engine_args=taken.get("engine_args", ""),
        **own,
    )


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


async def _adapters(stack: Stack) -> tuple[list[str], dict[str, Any]]:
    """The names that all tenants share, and the refused adapters. Asks NATS, since the gateway may want an API key."""
    async with contextlib.AsyncExitStack() as closing:
        bus = await Bus.connect(stack.bus_config("gateway"), "motet-up", inbox="gateway")
        closing.push_async_callback(bus.close)
        watch = AdapterWatch(bus)
        await watch.start()
        closing.push_async_callback(watch.stop)
        return [info.entry.name for info in watch.visible(SHARED)], msgspec.to_builtins(watch.refused)


async def summary(stack: Stack) -> str:
    """Text shown after the start: the URL, and a command to try."""
    options, url = stack.options, stack.urls[0]
    base, shown, refused = options.served_model_name, "", ""
    adapters: list[str] = []
    with contextlib.suppress(MotetError):
        adapters, bad = await _adapters(stack)
        shown = f" with {counted(len(adapters), 'adapter')}"
        refused = "".join(f"\n{line}" for line in refused_lines(bad))
    more = (" --cacert CA_FILE" if options.tls_cert_file else "") + (
        "" if options.keyless else ' -H "Authorization: Bearer $MOTET_API_KEY"'
    )
    keyless = "\n  No API keys: everybody who reaches this address is an administrator.\n" if options.keyless else ""
    model = "upper-case" if "upper-case" in adapters else min(adapters, default=base)
    body = {"model": model, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 64, "stream": True}
    return f"""ready: {base}{shown}{refused}

  {url}/v1

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{more} \\
    -d {shlex.quote(json.dumps(body))}
{keyless}
  NATS {stack.nats_url} (user upstream, password in {stack.credentials_dir / "upstream.password"})
  logs in {stack.data_dir / "logs"}; Ctrl-C drains and stops.
"""
