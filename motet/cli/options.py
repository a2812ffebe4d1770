"""Configuration options on the command line, made from the one place where each is declared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from motet.shared.config import Config, Field, ServiceConfig, field, fields

F = TypeVar("F", bound=Callable[..., Any])
SERVICES = ("gateway", "worker", "registry", "scheduler", "predictor")


def config_of(kind: str) -> type[ServiceConfig]:
    """The configuration of a kind of service: `services.<kind>.config.<Kind>Config`."""
    found: type[ServiceConfig] = getattr(importlib.import_module(f"motet.services.{kind}.config"), f"{kind.capitalize()}Config")
    return found


class ConfigOption(click.Option):
    """An option of a configuration, None when it is not given. `declared` is where it comes from."""

    def __init__(self, declared: Field, words: list[str], **how: Any) -> None:
        super().__init__(words, default=None, shell_complete=self._choices, **how)
        self.declared = declared

    def _choices(self, _: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        return [choice for choice in self.declared.choices if choice.startswith(incomplete)]


def option_for(option: Field, help_text: str = "") -> ConfigOption:
    """A configuration's option for click.

    `shared.config.load` reads the variable, knows the default and checks values, so each error has one message.
    """
    required = option.default is msgspec.NODEFAULT
    shown = "" if required or option.default in ("", None, ()) else f"  [default: {_text(option.default)}]"
    text = (
        option.description[:1].upper() + option.description[1:] + (f"  [required; or {option.variable}]" if required else shown)
    )
    if option.type is bool:
        return ConfigOption(option, [f"{option.flag}/--no-{option.flag[2:]}"], help=help_text or text)
    kind = "TEXT" if option.type in (str, Path) else getattr(option.type, "__name__", "text").upper()
    metavar = f"[{'|'.join(option.choices)}]" if option.choices else kind
    return ConfigOption(option, [option.flag], metavar=metavar, help=help_text or text)


class HelpAll(click.Command):
    """A command whose --help leaves options out; --help-all shows them too."""

    def offer_help_all(self, text: str) -> None:
        """Add the option, with `text` as its help."""
        self.params.append(
            click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=self._all, help=text)
        )

    def _all(self, ctx: click.Context, _: click.Parameter, asked: bool) -> None:
        if asked and not ctx.resilient_parsing:
            ctx.meta[__name__] = True
            click.echo(ctx.get_help())
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in self.listed(self.get_params(ctx), everything=ctx.meta.get(__name__, False)):
            if rows := [row for one in options if (row := one.get_help_record(ctx)) is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def listed(self, options: list[click.Parameter], *, everything: bool) -> Iterator[tuple[str, list[click.Parameter]]]:
        """The options to show, by the title of their section; `everything`: with --help-all."""
        raise NotImplementedError


def words_for(kind: str, values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give a service those of `values` that it has an option for."""
    words: list[str] = []
    for option in fields(config_of(kind)):
        if (value := values.get(option.name)) is None:
            continue
        if option.type is bool:
            words.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            words += [f"{option.flag}={value}"] if str(value).startswith("-") else [option.flag, str(value)]
    return words


def takes(config: type[Config], name: str) -> Callable[[F], F]:
    """A decorator like `click.option`: the command takes option `name` of a configuration."""

    def decorate(command: F) -> F:
        params = command.__dict__.setdefault("__click_params__", [])  # where click's own decorators put theirs
        params.append(option_for(field(config, name)))
        return command

    return decorate


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
