"""The configuration loader: frozen structs, filled once at start-up from flags, else `MOTET_*` variables, else defaults.

A field `kv_blocks: int = 0` is the flag `--kv-blocks` and the variable `MOTET_KV_BLOCKS`. Constraints live in the type
(`Annotated[int, Meta(ge=1, description="...")]`) and a violation is a `ConfigError` naming the field. A field whose
name ends in `_file` is the path of a file, so that secrets never appear in an environment.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import ssl
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

C = TypeVar("C", bound="ServiceConfig")


class ConfigError(Exception):
    """A configuration value that cannot be used; the message names the flag, the variable and the reason."""


class BusConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the NATS connection."""

    nats_url: Annotated[str, Meta(description="URL of the NATS server, or comma-separated URLs of a cluster")] = (
        "nats://127.0.0.1:4222"
    )
    nats_user: Annotated[str, Meta(description="NATS user; empty for none")] = ""
    nats_password_file: Annotated[str, Meta(description="file holding the NATS user's password")] = ""
    nats_creds: Annotated[str, Meta(description="NATS .creds file (JWT and nkey), instead of user and password")] = ""
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


class ServiceConfig(BusConfig, frozen=True, kw_only=True):
    """Options of every service."""

    instance_id: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z0-9_-]|\{kind\}|\{hostname\})*$",
            description="id of this process on the bus; {kind} and {hostname} are replaced; empty: a random id",
        ),
    ] = ""
    ops_host: Annotated[str, Meta(description="address of /health, /ready and /metrics")] = "127.0.0.1"
    ops_port: Annotated[int, Meta(ge=0, le=65535, description="port of /health, /ready and /metrics; 0 for any")] = 0
    drain_s: Annotated[float, Meta(ge=0, description="seconds that a stopping service gives to running requests")] = 20.0
    log_level: Annotated[
        str, Meta(pattern="^(debug|info|warning|error)$", description="log level: debug, info, warning, error")
    ] = "info"
    log_json: Annotated[bool, Meta(description="log lines as JSON objects")] = False

    def identity(self, kind: str) -> str:
        """This process's id: the configured one, or `<kind>-<random>`. Unusual characters of a host name become `-`."""
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())
        return self.instance_id.format(kind=kind, hostname=host) or f"{kind}-{secrets.token_hex(4)}"


class Field(msgspec.Struct, frozen=True):
    """A configuration field as the command line and the documentation show it."""

    name: str
    flag: str
    variable: str
    type: type
    default: Any
    description: str


def fields(cls: type[msgspec.Struct]) -> list[Field]:
    """The fields of a config struct, in declaration order with the shared ones last."""
    hints = typing.get_type_hints(cls, include_extras=True)
    out = []
    for info in msgspec.structs.fields(cls):
        hint = hints[info.name]
        meta = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Meta)]
        base = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        if isinstance(base, types.UnionType):
            base = next(a for a in typing.get_args(base) if a is not type(None))
        default = msgspec.NODEFAULT if info.required else info.default
        out.append(
            Field(
                name=info.name,
                flag="--" + info.name.replace("_", "-"),
                variable="MOTET_" + info.name.upper(),
                type=base,
                default=default,
                description=next((m.description for m in meta if m.description), ""),
            )
        )
    return out


def load(cls: type[C], flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> C:
    """A `cls` from `flags` (field name -> value, None for not given), `environ` and defaults.

    Raises ConfigError with the flag's name when a value is missing, of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    for field in fields(cls):
        given = flags.get(field.name)
        if given is None and field.variable in environ:
            given = environ[field.variable]
        if given is None:
            if field.default is msgspec.NODEFAULT:
                raise ConfigError(f"{field.flag} (or {field.variable}) is required: {field.description}")
            continue
        values[field.name] = given
    try:
        return msgspec.convert(values, cls, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        name = text.rsplit("`$.", 1)[-1].rstrip("`") if "`$." in text else ""
        flag = "--" + name.replace("_", "-") if name else "configuration"
        raise ConfigError(f"{flag}: {text.split(' - ')[0]}") from None


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
