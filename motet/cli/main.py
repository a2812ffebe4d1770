"""The `motet` command. Subcommands are imported when they are used, so `motet --help` is fast and needs no torch.

The options of a service are generated from its configuration struct, which declares flag, variable, default and description.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, NoReturn

import click

from motet.cli.options import ConfigOption, HelpAll, config_of, option_for
from motet.shared.config import ConfigError, ServiceConfig, fields, load

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "The mesh": {
        "up": ("motet.cli.up:up", "Start the whole mesh on this machine."),
        "restart": (
            "motet.cli.restart:restart",
            "Replace every process of a running mesh, one by one, without errors for clients.",
        ),
        "demo": ("motet.cli.demo:demo", "Start a mesh, try every feature, print a table, stop."),
        "nats-config": ("motet.cli.nats_config:nats_config", "Write a NATS server's configuration and passwords."),
    },
    "Using it": {
        "chat": ("motet.cli.chat:chat", "Chat with an adapter or the base model."),
        "image": ("motet.cli.image:image", "Draw a picture with adapters."),
        "complete": ("motet.cli.chat:complete", "Complete a prompt."),
        "adapters": ("motet.cli.adapters:adapters", "Add, list, show and remove adapters."),
        "keys": ("motet.cli.keys:keys", "Make, list, rotate and revoke API keys."),
        "audit": ("motet.cli.keys:audit", "List who changed which adapter or key, and when."),
        "status": ("motet.cli.status:status", "Show workers, queues and memory of a running mesh."),
        "logs": ("motet.cli.logs:logs", "Print the logs of a running mesh."),
        "scale": ("motet.cli.scale:scale", "Show how many workers there should be."),
        "homes": ("motet.cli.homes:homes", "Show the adapters at home on each worker, or place those of a plan."),
        "rebalance": ("motet.cli.rebalance:rebalance", "Show which requests would move to other workers."),
    },
    "Planning": {
        "quantize": ("motet.cli.quantize:quantize", "Write a model with weights of 8 or 4 bits."),
        "profile": ("motet.cli.profile:profile", "Measure a worker's step times on this machine."),
        "plan": ("motet.cli.plan:plan", "Plan how many workers a set of adapters needs."),
        "simulate": ("motet.cli.simulate:simulate", "Simulate a cluster under a workload (the digital twin)."),
    },
    "Single services": {
        "gateway": ("", "Serve HTTP and durable requests; own each request until its last token."),
        "predictor": ("", "Predict the output lengths of requests."),
        "scheduler": ("", "Assign requests to workers."),
        "registry": ("", "Validate, store and publish adapters."),
        "worker": ("", "Run one engine on one device."),
    },
}
SUBCOMMANDS = {
    "predictor": {
        "train": ("motet.cli.predictor:train", "Fine-tune a proxy model to finished requests."),
        "evaluate": ("motet.cli.predictor:evaluate", "Judge length models on finished requests."),
    }
}
MEANT = {"serve": "up", "start": "up", "run": "up", "ps": "status", "list": "adapters list", "lora": "adapters"}
"""What people type who know another tool, and the command that they look for."""
EXIT_CONFIG = 2


class LazyGroup(click.Group):
    """A group that lists its commands without importing them, with a suggestion for a name that is none of them."""

    @property
    def sections(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Its commands, as `COMMANDS` has them."""
        return COMMANDS

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name, known = str(args[0]), self.list_commands(ctx)
        if not ctx.resilient_parsing and not name.startswith("-") and name not in known:
            if name in MEANT:
                ctx.fail(f"No such command {name!r}. Did you mean 'motet {MEANT[name]}'?")
            raise click.NoSuchCommand(name, possibilities=known, ctx=ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in self.sections.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for section in self.sections.values():
            if cmd_name in section:
                target, _ = section[cmd_name]
                command: click.Command = resolve_name(target) if target else service_command(cmd_name)
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, short) for name, (_, short) in section.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="motet", prog_name="motet")
def cli() -> None:
    """Motet serves many LoRA adapters on one base model, with a latency objective for each request.

    \b
    Start here:
      motet up --demo
      motet chat --model upper-case "hello there"
      motet adapters list
    """


class ServiceCommand(HelpAll):
    """A service's command. Its --help leaves out the options for experiments; --help-all shows them too."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        if any(_is_expert(option) for option in self.params):
            self.offer_help_all("Show every option, those for experiments too, and exit.")

    def listed(self, options: list[click.Parameter], *, everything: bool) -> Iterator[tuple[str, list[click.Parameter]]]:
        yield "Options", [one for one in options if not _is_expert(one)]
        if everything:
            yield "For experiments", [one for one in options if _is_expert(one)]


def _is_expert(option: click.Parameter) -> bool:
    return isinstance(option, ConfigOption) and option.declared.expert


class ServiceGroup(ServiceCommand, LazyGroup):
    """A service's command that has subcommands; without one of them it runs the service."""

    @property
    def sections(self) -> dict[str, dict[str, tuple[str, str]]]:
        return {"Commands": SUBCOMMANDS[self.name or ""]}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def service_command(kind: str) -> click.Command:
    """The command of one service (`motet gateway`, ...), from `services.<kind>.config`."""
    config_type = config_of(kind)

    def run(**flags: Any) -> None:
        if click.get_current_context().invoked_subcommand is not None:
            return
        try:
            config = load(config_type, flags)
            status: int = importlib.import_module(f"motet.services.{kind}.service").main(config)
        except ConfigError as error:
            click.echo(f"motet {kind}: {error}", err=True)
            sys.exit(EXIT_CONFIG)
        _leave(status)

    short, about = COMMANDS["Single services"][kind][1], (config_type.__doc__ or "").strip()
    shared = {option.name for option in fields(ServiceConfig)}
    params: list[click.Parameter] = [
        option_for(option) for option in sorted(fields(config_type), key=lambda option: option.name in shared)
    ]
    text = (
        f"{short}\n\n{about}\n\nEvery option is also an environment variable: --ops-port is MOTET_OPS_PORT. A flag goes"
        " before the variable, and the variable before the default."
    )
    if kind in SUBCOMMANDS:
        return ServiceGroup(kind, callback=run, params=params, help=text, invoke_without_command=True)
    return ServiceCommand(kind, callback=run, params=params, help=text)


def _leave(status: int) -> NoReturn:
    """End the process of a service, which has released everything. Taking the interpreter apart as well would take seconds."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> int:
    """Entry point of the `motet` script."""
    from motet.cli.client import ApiError

    try:
        cli.main(prog_name="motet", standalone_mode=True)
    except ApiError as error:
        click.echo(f"motet: {error}", err=True)
        return 1
    return 0
