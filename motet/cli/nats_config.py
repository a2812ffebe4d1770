"""`motet nats-config`: writes users, permissions and passwords for a NATS server other than the embedded one."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from motet.cli import certificates, credentials
from motet.cli.options import takes
from motet.services.registry.config import PublishersConfig
from motet.shared.config import ConfigError, load
from motet.shared.keys import add_to_key_file
from motet.shared.tenancy import DEFAULT_TENANT

READABLE_IN_CONTAINERS = 0o644


@click.command("nats-config")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Directory to write to.")
@click.option("--listen", default="0.0.0.0:4222", show_default=True, help="Address on which the server accepts clients.")
@click.option("--monitor", default="0.0.0.0:8222", show_default=True, help="Address on which the server answers health checks.")
@click.option("--store-dir", default="/data/jetstream", show_default=True, help="Directory for the server's JetStream files.")
@click.option("--tls", is_flag=True, help="Also make certificates, and make the server accept TLS only.")
@click.option("--tls-host", "hosts", multiple=True, help="Further name or address of the server and gateways (repeatable).")
@click.option("--tls-files", default="", help="Directory of nats.crt and nats.key on the server.  [default: --out]")
@takes(PublishersConfig, "tenants")
def nats_config(out: Path, tenants: str | None, tls: bool, hosts: tuple[str, ...], tls_files: str, **server: str) -> None:
    """Write nats.conf and one password file per user. Existing passwords are kept.

    Every service gets a user that is limited to the service's own subjects. `upstream` may publish durable requests and read
    their results; `operator` may do everything. `api-keys` contains an administrator's key for --api-keys-file of the gateways.
    Only you can enter the directory; the files are readable by others, so that a container's user can read them when mounted.

    \b
      motet nats-config --out compose/secrets
      nats-server -c compose/secrets/nats.conf
      motet up --model ... --nats-url nats://bus:4222 --credentials compose/secrets

    --tls also writes certificates from an authority of their own: `ca.crt` for clients, `nats.crt` and `nats.key` for the
    server, `gateway.crt` and `gateway.key` for the gateways. `ca.key` signs them; keep it off the servers. A later run renews
    certificates that expire within 30 days; then restart the services that use them.

    \b
      motet nats-config --out secrets --tls --tls-host bus.example.org
      motet up --model ... --nats-url tls://bus.example.org:4222 --credentials secrets --nats-tls-ca-file secrets/ca.crt
    """
    try:
        names = load(PublishersConfig, {"tenants": tenants}).names
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        made = certificates.write(out, hosts) if tls else []
        files = (tls_files or str(out.resolve())) if tls else ""
        config = credentials.write_server_config(out, tenants=names, tls_files=files, **server)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    grafana = credentials.password_file(out, "grafana")
    if not grafana.exists():
        credentials.write_private(grafana, secrets.token_urlsafe(32) + "\n")
    api_keys = out / "api-keys"
    if not api_keys.exists():
        add_to_key_file(api_keys, DEFAULT_TENANT, "admin")
    if not out.stat().st_mode & 0o077:
        passwords = (credentials.password_file(out, user) for user in credentials.grants(names))
        for path in (config, grafana, api_keys, *passwords, *made):
            path.chmod(READABLE_IN_CONTAINERS)
    click.echo(f"{config}\n{len(credentials.grants(names))} users, passwords in {out}/<user>.password")
    if tls:
        click.echo(f"certificates of {certificates.AUTHORITY} in {out}: {', '.join(path.name for path in made)}")
