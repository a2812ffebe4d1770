"""`motet keys` and `motet audit`: manage the API keys of a running mesh and read its audit log."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from motet.cli.terminal import as_json_option, ask, connection, print_json, table, terminal
from motet.shared.errors import BadRequest
from motet.shared.keys import ROLES, add_to_key_file
from motet.shared.tenancy import DEFAULT_TENANT

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Duration(click.ParamType):
    """`90d`, `12h`, `0`: a number and s, m, h, d or w; in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", str(value))
        if found is None:
            self.fail(f"{value!r}: a number and s, m, h, d or w is expected, such as 90d", param, ctx)
        return float(found[1]) * _UNITS_S[found[2] or "s"]


DURATION = Duration()


@click.group()
def keys() -> None:
    """Make, list, rotate and revoke API keys.

    A key belongs to a tenant and has a role: `use` (generate), `adapters` (also change the tenant's adapters) or `admin`
    (everything). Changes take effect at once on every gateway. These commands need an admin key in MOTET_API_KEY.

    \b
      motet keys create --file keys.txt --role admin       the first one, for `--api-keys-file keys.txt`
      export MOTET_API_KEY=mtt_...
      motet keys create --tenant acme --name "web shop"
    """


@keys.command("list")
@connection
@as_json_option
def list_(url: str, as_json: bool) -> None:
    """List the keys: id, tenant, role, name, created, expires. Only digests of the keys are stored."""
    answer = ask(url, "GET", "/v1/keys")
    if as_json:
        return print_json(answer)
    names = ("id", "tenant", "role", "name", "created", "expires")
    rows = [[*(str(key[name]) for name in names[:4]), _when(key["created"]), _until(key)] for key in answer["data"]]
    _table(names, rows)


@keys.command()
@connection
@as_json_option
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, help="Tenant that the key belongs to.")
@click.option("--role", default="use", show_default=True, type=click.Choice(ROLES), help="What the key may do.")
@click.option("--name", default="", help="Description of the key.")
@click.option("--expires", default="0", type=DURATION, help="Lifetime of the key: 90d, 12h.  [default: unlimited]")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the key to this file (for --api-keys-file) instead of a running mesh.",
)
def create(tenant: str, role: str, name: str, expires: float, file: Path | None, url: str, as_json: bool) -> None:
    """Make a key and print it. It is shown only this once.

    \b
      motet keys create --tenant acme --name "web shop"
      motet keys create --tenant acme --role adapters --name ci --expires 90d
      motet keys create --role admin --file keys.txt
    """
    if file is not None:
        if expires or name:
            raise click.UsageError("--file: keys of a file have neither --name nor --expires")
        try:
            return click.echo(add_to_key_file(file, tenant, role))
        except BadRequest as error:
            raise click.UsageError(error.message) from None
    asked = {"tenant": tenant, "role": role, "name": name, "expires_in_s": expires}
    _show_new(ask(url, "POST", "/v1/keys", json=asked), as_json)


@keys.command()
@connection
@as_json_option
@click.option("--overlap", default="1d", show_default=True, type=DURATION, help="How long the old key stays valid.")
@click.argument("key_id")
def rotate(key_id: str, overlap: float, url: str, as_json: bool) -> None:
    """Make a new key with the rights of KEY_ID. The old key expires after the overlap.

    \b
      motet keys rotate key_5c0f... --overlap 2d
    """
    _show_new(ask(url, "POST", f"/v1/keys/{key_id}/rotate", json={"overlap_s": overlap}), as_json)


@keys.command()
@connection
@click.argument("key_id")
def revoke(key_id: str, url: str) -> None:
    """Revoke KEY_ID now. Running requests are finished."""
    ask(url, "DELETE", f"/v1/keys/{key_id}")
    click.echo(f"revoked {key_id}")


@click.command()
@connection
@as_json_option
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, 1000), help="Number of entries, newest first.")
def audit(limit: int, url: str, as_json: bool) -> None:
    """List who changed which adapter or key, and when.

    \b
      motet audit --limit 20
      motet audit --json | jq '.data[] | select(.tenant == "acme")'
    """
    answer = ask(url, "GET", "/v1/audit", params={"limit": str(limit)})
    if as_json:
        return print_json(answer)
    names = ("action", "object", "tenant", "actor", "detail")
    _table(("at", *names), [[_when(event["at"]), *(event[name] for name in names)] for event in answer["data"]])


def _show_new(key: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return print_json(key)
    click.echo(key["key"])
    click.echo(f"{key['id']}: tenant {key['tenant']}, role {key['role']}, ends {_until(key)}; not shown again", err=True)


def _table(names: tuple[str, ...], rows: list[list[str]]) -> None:
    listed = table(*names)
    for row in rows:
        listed.add_row(*row)
    terminal().print(listed)


def _when(unix_s: int | None) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if unix_s else "-"


def _until(key: dict[str, Any]) -> str:
    return "never" if not key["expires"] else _when(key["expires"]) + (" (over)" if key["expired"] else "")
