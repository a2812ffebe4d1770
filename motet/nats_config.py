"""`motet nats-config`: the bus's users, permissions and passwords for a NATS server that is not the embedded one."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from motet import certificates, credentials
from shared.keys import add_to_key_file
from shared.tenancy import DEFAULT_TENANT

READABLE_IN_CONTAINERS = 0o644


@click.command("nats-config")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Directory to write to.")
@click.option("--listen", default="0.0.0.0:4222", show_default=True, help="Where the server listens for clients.")
@click.option("--monitor", default="0.0.0.0:8222", show_default=True, help="Where it answers health checks.")
@click.option("--store-dir", default="/data/jetstream", show_default=True, help="Where it keeps JetStream's files.")
@click.option("--tls", is_flag=True, help="Also make certificates, and let the server speak TLS only.")
@click.option("--tls-host", "hosts", multiple=True, help="Another name or address of the server and the gateways (repeatable).")
@click.option("--tls-files", default="", help="Where the server finds nats.crt and nats.key.  [default: --out]")
@click.option("--tenant", "tenants", multiple=True, default=("default",), show_default=True, help="Tenant that may publish.")
def nats_config(out: Path, tenants: tuple[str, ...], tls: bool, hosts: tuple[str, ...], tls_files: str, **server: str) -> None:
    """Write nats.conf and one password file per user; existing passwords stay.

    Every service gets a user of its own that may only do its own work on the bus; `upstream` may publish durable
    requests and read their results; `operator` may do everything. `api-keys` holds an administrator's key for the gateways'
    --api-keys-file. Only you can enter the directory; the files in it can
    be read by a container's own user once they are mounted there.

    \b
      motet nats-config --out compose/secrets
      nats-server -c compose/secrets/nats.conf
      motet up --model ... --nats-url nats://bus:4222 --credentials compose/secrets

    With --tls there are certificates as well, of an authority of their own: `ca.crt` for whoever connects, `nats.crt` and
    `nats.key` for the server, `gateway.crt` and `gateway.key` for the gateways' https. `ca.key` signs them and belongs on no
    server. Run it again to renew those that end within 30 days, and restart what uses them.

    \b
      motet nats-config --out secrets --tls --tls-host bus.example.org
      motet up --model ... --nats-url tls://bus.example.org:4222 --credentials secrets --nats-tls-ca-file secrets/ca.crt
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        made = certificates.write(out, hosts) if tls else []
        files = (tls_files or str(out.resolve())) if tls else ""
        config = credentials.write_server_config(out, tenants=tenants, tls_files=files, **server)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    grafana = credentials.password_file(out, "grafana")
    if not grafana.exists():
        credentials.write_private(grafana, secrets.token_urlsafe(32) + "\n")
    api_keys = out / "api-keys"
    if not api_keys.exists():
        add_to_key_file(api_keys, DEFAULT_TENANT, "admin")
    if not out.stat().st_mode & 0o077:
        passwords = (credentials.password_file(out, user) for user in credentials.grants(tenants))
        for path in (config, grafana, api_keys, *passwords, *made):
            path.chmod(READABLE_IN_CONTAINERS)
    click.echo(f"{config}\n{len(credentials.grants(tenants))} users, passwords in {out}/<user>.password")
    if tls:
        click.echo(f"certificates of {certificates.AUTHORITY} in {out}: {', '.join(path.name for path in made)}")
