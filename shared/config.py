"""Configuration: frozen structs, filled once at start-up from flags, else `MOTET_*` variables, else defaults.

    WorkerConfig                       a service: groups of options
      .bus       BusConfig             a group, here one that every service has
         .nats_url                     an option: flag --nats-url, variable MOTET_NATS_URL

- An option has one name: the field's. Groups order the code and the documentation; they are no part of the name.
- Type, limits and description stand in the field's annotation (`Annotated[int, Meta(ge=1, description="...")]`). The command
  line, `motet up`, `motet profile` and docs/configuration.md read them there.
- A value that does not fit is a `ConfigError` that names the flag.
- An option whose name ends in `_file` is the path of a file, so that secrets never appear in an environment.
- Variables of other kinds are in `shared/variables.py`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import ssl
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import Meta

from motet.shared.plugins import PluginError, import_plugins
from motet.shared.tables import Table, UnknownName

C = TypeVar("C", bound="Config")
PLUGINS = "plugins"
"""The option that is read before all that may name what plug-ins add: `ProcessConfig` comes first in every service."""
COMMON = {"help": "common"}
"""`Meta(extra=COMMON)`: `motet up --help` shows the option; it shows the others with --help-all."""
EXPERT = {"help": "expert"}
"""`Meta(extra=EXPERT)`: for experiments; only --help-all shows the option, and its page lists it last."""
PER_PROCESS = {"help": "process"}
"""`Meta(extra=PER_PROCESS)`: every process needs its own value, so `motet up` sets the option itself."""


class ConfigError(Exception):
    """A configuration value that cannot be used; the message names the flag, the variable and the reason."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A group of options, or a service's whole configuration. Fields are options or groups."""

    @classmethod
    def of(cls, **options: Any) -> Self:
        """A configuration with these options, named without their groups, and defaults. Reads no variables.

        Raises ConfigError for a value that does not fit and for a name that is no option.
        """
        return load(cls, options, {})


class BusConfig(Config, frozen=True, kw_only=True):
    """The connection to NATS."""

    nats_url: Annotated[str, Meta(description="URL of the NATS server, or comma-separated URLs of a cluster", extra=COMMON)] = (
        "nats://127.0.0.1:4222"
    )
    nats_user: Annotated[str, Meta(description="NATS user; empty for none")] = ""
    nats_password_file: Annotated[str, Meta(description="file holding the NATS user's password")] = ""
    nats_tls_ca_file: Annotated[
        str, Meta(description="certificate authority of the NATS server; if given, connections without TLS are refused")
    ] = ""
    nats_tls_cert_file: Annotated[str, Meta(description="client certificate for NATS, if the server asks for one")] = ""
    nats_tls_key_file: Annotated[str, Meta(description="private key of --nats-tls-cert-file")] = ""
    nats_replicas: Annotated[
        int, Meta(ge=1, le=5, description="replicas of JetStream streams and buckets on a NATS cluster")
    ] = 1

    def nats_tls(self) -> ssl.SSLContext | None:
        """The TLS context for NATS, or None for a connection without TLS. Raises ConfigError when a file cannot be used."""
        wanted = any(url.strip().startswith("tls://") for url in self.nats_url.split(","))
        if not (wanted or self.nats_tls_ca_file or self.nats_tls_cert_file):
            return None
        try:
            context = ssl.create_default_context(cafile=self.nats_tls_ca_file or None)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"--nats-tls-ca-file: {self.nats_tls_ca_file}: {error.strerror or error}") from None
        load_certificate(context, self.nats_tls_cert_file, self.nats_tls_key_file, flag="--nats-tls")
        return context


class ProcessConfig(Config, frozen=True, kw_only=True):
    """Options of every service process: instance id, port for health and metrics, logging, time to drain."""

    instance_id: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z0-9_-]|\{kind\}|\{hostname\})*$",
            description="id of this process on the bus; {kind} and {hostname} are replaced; empty: a random id",
            extra=PER_PROCESS,
        ),
    ] = ""
    ops_host: Annotated[str, Meta(description="address of /health, /ready and /metrics")] = "127.0.0.1"
    ops_port: Annotated[
        int, Meta(ge=0, le=65535, description="port of /health, /ready and /metrics; 0 for any", extra=PER_PROCESS)
    ] = 0
    drain_s: Annotated[
        float, Meta(ge=0, description="seconds that a stopping service gives to running requests", extra=COMMON)
    ] = 20.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least severe messages to log")] = (
        "info"
    )
    log_json: Annotated[bool, Meta(description="log lines as JSON objects")] = False
    plugins: Annotated[
        str,
        Meta(
            description="Python modules or .py files to import at start, comma-separated: they add policies, engines, adapter"
            " sources, kinds of requests or HTTP routes (docs/extending.md)"
        ),
    ] = ""

    def identity(self, kind: str) -> str:
        """This process's id: the configured one, or `<kind>-<random>`. Unusual characters of a host name become `-`."""
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
        return self.instance_id.format(kind=kind, hostname=host) or f"{kind}-{secrets.token_hex(4)}"


class ServiceConfig(Config, frozen=True, kw_only=True):
    """Options of every service."""

    bus: BusConfig = BusConfig()
    process: ProcessConfig = ProcessConfig()


class BaseModelConfig(Config, frozen=True, kw_only=True):
    """The base model. Gateway, registry and workers of one mesh must be given the same one."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="base model: a local directory or a Hugging Face id, of a language model, or of an image model of the"
            " Stable Diffusion family (model_index.json). A gateway reads tokenizer, chat template and configurations, the"
            " registry configurations, a worker everything",
            extra=COMMON,
        ),
    ]
    served_model_name: Annotated[
        str, Meta(description="the base model's name in requests; empty: last part of --model", extra=COMMON)
    ] = ""

    @property
    def name(self) -> str:
        """The name under which requests ask for the base model."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]


MaxLoraRank = Annotated[
    int,
    Meta(ge=1, le=512, description="largest adapter rank that the registry accepts and a worker can hold", extra=COMMON),
]
MAX_LORA_RANK = 256


class Field(msgspec.Struct, frozen=True):
    """An option as the command line and the documentation show it."""

    name: str
    groups: tuple[tuple[str, type[Config]], ...]
    """From the configuration inwards: the field that holds a group, and the group."""
    hint: Any
    """The annotated type, which `msgspec.convert` checks values against."""
    default: Any
    """`msgspec.NODEFAULT` for a required option."""
    description: str
    extra: Mapping[str, Any] = {}
    """`COMMON`, `EXPERT`, `PER_PROCESS` or none of them."""

    @property
    def common(self) -> bool:
        """Whether most people need to know the option."""
        return self.extra == COMMON

    @property
    def expert(self) -> bool:
        """Whether the option is for experiments."""
        return self.extra == EXPERT

    @property
    def per_process(self) -> bool:
        """Whether processes of one mesh cannot share a value."""
        return self.extra == PER_PROCESS

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "MOTET_" + self.name.upper()

    @property
    def type(self) -> Any:
        """The type without limits and description."""
        return typing.get_args(self.hint)[0] if typing.get_origin(self.hint) is Annotated else self.hint

    @property
    def table(self) -> Table[Any] | None:
        """The table that has the things which the option can name."""
        return next((part for part in getattr(self.hint, "__metadata__", ()) if isinstance(part, Table)), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that the option can have, when they can be listed."""
        if self.table is not None:
            return tuple(self.table)
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    def read(self, text: Any) -> Any:
        """The value of a flag or variable. Raises ConfigError with the flag's name.

        Reading `plugins` imports them: options that are read later may name what they add.
        """
        try:
            value = msgspec.convert(text, self.hint, strict=False)
            if self.table is not None:
                self.table.named(value)
            if self.name == PLUGINS:
                import_plugins(value)
        except (msgspec.ValidationError, UnknownName, PluginError) as error:
            raise ConfigError(f"{self.flag}: {error}") from None
        return value


@cache
def fields(cls: type[Config]) -> tuple[Field, ...]:
    """All options of a configuration, in the order in which they are declared."""
    return tuple(_fields(cls, ()))


def _fields(cls: type[Config], groups: tuple[tuple[str, type[Config]], ...]) -> typing.Iterator[Field]:
    hints = typing.get_type_hints(cls, include_extras=True)
    for info in msgspec.structs.fields(cls):
        hint = hints[info.name]
        if isinstance(hint, type) and issubclass(hint, Config):
            yield from _fields(hint, (*groups, (info.name, hint)))
            continue
        meta = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Meta)]
        yield Field(
            name=info.name,
            groups=groups,
            hint=hint,
            default=msgspec.NODEFAULT if info.required else info.default,
            description=next((m.description for m in meta if m.description), ""),
            extra=next((m.extra for m in meta if m.extra), {}),
        )


def field(cls: type[Config], name: str) -> Field:
    """The option `name` of a configuration."""
    return next(one for one in fields(cls) if one.name == name)


def load(cls: type[C], flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> C:
    """The configuration `cls` from `flags` (option name -> value, None if not given), `environ` and defaults.

    Raises ConfigError with the flag's name when a value is missing, of the wrong type or out of range, or when a name is not an
    option.
    """
    values: dict[str, Any] = {}
    unknown = set(flags)
    for option in fields(cls):
        unknown.discard(option.name)
        given = flags.get(option.name)
        if given is None:
            given = environ.get(option.variable)
        if given is None and option.default is msgspec.NODEFAULT:
            raise ConfigError(f"{option.flag} (or {option.variable}) is required: {option.description}")
        if given is not None:
            group = values
            for name, _ in option.groups:
                group = group.setdefault(name, {})
            group[option.name] = option.read(given)
    if unknown:
        raise ConfigError(f"{cls.__name__} has no option {', '.join(sorted(unknown))}")
    return msgspec.convert(values, cls)


def load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str, *, flag: str) -> None:
    """Load a certificate into `context`, if one is given. Raises ConfigError naming `<flag>-cert-file` or `<flag>-key-file`."""
    if bool(cert_file) != bool(key_file):
        raise ConfigError(f"{flag}-cert-file and {flag}-key-file belong together")
    if not cert_file:
        return
    try:
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        raise ConfigError(f"{flag}-cert-file: {cert_file} with {key_file}: {error.strerror or error}") from None


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_secret(path: str) -> str:
    """The content of a secret file without the final newline; "" for no path. Raises ConfigError when unreadable."""
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"secret file {path}: {error.strerror}") from None
