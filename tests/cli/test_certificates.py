"""Promise: clients with ca.crt trust the certificates of `motet nats-config --tls`; required TLS is always used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from motet.cli import certificates, credentials
from motet.cli.client import ApiError, Client
from motet.cli.main import cli
from motet.cli.nats_server import NatsServer, binary
from motet.shared import bus as shared_bus
from motet.shared.bus import Bus
from motet.shared.config import BusConfig, ConfigError
from motet.shared.errors import Unavailable
from motet.shared.keys import read_key_file
from motet.shared.provision import provision
from tests.services.gateway.conftest import Mesh
from tests.services.gateway.conftest import http as http_fixture
from tests.services.gateway.conftest import mesh as mesh_fixture
from tests.services.gateway.support import running_gateway
from tests.support import eventually

http, mesh = http_fixture, mesh_fixture


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates for this machine."""
    out = tmp_path_factory.mktemp("certificates")
    certificates.write(out)
    return out


def contents(out: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(out.iterdir())}


def test_certificates_stay_until_they_lack_a_host_or_near_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = certificates.write(tmp_path)
    assert [path.name for path in needed] == ["ca.crt", "nats.crt", "nats.key", "gateway.crt", "gateway.key"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    first = contents(tmp_path)
    certificates.write(tmp_path)
    assert contents(tmp_path) == first
    certificates.write(tmp_path, ["bus.example.org", "10.1.2.3"])
    second = contents(tmp_path)
    assert second["ca.crt"] == first["ca.crt"] and second["nats.crt"] != first["nats.crt"]
    monkeypatch.setattr(certificates, "RENEW", timedelta(days=10_000))
    certificates.write(tmp_path, ["bus.example.org", "10.1.2.3"])
    assert contents(tmp_path)["nats.crt"] != second["nats.crt"] and contents(tmp_path)["ca.key"] == first["ca.key"]


def test_a_foreign_authority_key_is_refused(tmp_path: Path, made: Path) -> None:
    (tmp_path / "ca.crt").write_text((made / "ca.crt").read_text())
    (tmp_path / "other").mkdir()
    certificates.write(tmp_path / "other")
    (tmp_path / "ca.key").write_text((tmp_path / "other" / "ca.key").read_text())
    with pytest.raises(ValueError, match="not the key"):
        certificates.write(tmp_path)


def test_the_certificate_lasts_as_long_as_clients_accept(made: Path) -> None:
    info = ssl._ssl._test_decode_cert(str(made / "nats.crt"))  # private: ssl decodes no file otherwise
    ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(info["notAfter"]), UTC)
    assert timedelta(days=800) < ends - datetime.now(UTC) < timedelta(days=826)
    assert {("DNS", "nats"), ("DNS", "localhost"), ("IP Address", "127.0.0.1")} <= set(info["subjectAltName"])


def test_the_command_writes_what_a_server_takes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["nats-config", "--out", str(out), "--tls", "--tls-host", "bus.example.org", "--store-dir", str(tmp_path / "js")]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    subprocess.run([binary(), "-t", "-c", str(out / "nats.conf")], check=True, capture_output=True)
    assert (out / "ca.key").stat().st_mode & 0o777 == 0o600, "it signs; no container needs it"
    assert (out / "nats.key").stat().st_mode & 0o777 == 0o644, "a container's own user reads it; only we enter the directory"
    assert f'"{out}/nats.crt"' in (out / "nats.conf").read_text()
    [admin] = read_key_file(str(out / "api-keys"))
    assert admin.role == "admin"
    elsewhere = CliRunner().invoke(cli, [*words, "--tls-files", "/run/secrets"])
    assert elsewhere.exit_code == 0 and '"/run/secrets/nats.key"' in (out / "nats.conf").read_text()


# ---- NATS


@pytest.fixture
async def tls_server(tmp_path: Path, made: Path) -> AsyncIterator[NatsServer]:
    """A NATS server that speaks TLS only, with our users."""
    text = credentials.authorization(tmp_path / "credentials")
    text += f'tls {{ cert_file: "{made / "nats.crt"}", key_file: "{made / "nats.key"}" }}\n'
    server = NatsServer(tmp_path / "tls-nats", config_text=text)
    await server.start()
    yield server
    server.stop()


def as_registry(server: NatsServer, tmp_path: Path, **tls: str) -> BusConfig:
    secret = credentials.password_file(tmp_path / "credentials", "registry")
    url = server.url.replace("nats://", "tls://")
    return BusConfig(nats_url=url, nats_user="registry", nats_password_file=str(secret), **tls)


async def test_a_service_talks_tls_to_a_server_of_the_authority(tls_server: NatsServer, tmp_path: Path, made: Path) -> None:
    bus = await Bus.connect(as_registry(tls_server, tmp_path, nats_tls_ca_file=str(made / "ca.crt")), "r", inbox="registry")
    await provision(bus)
    port = tls_server.port
    tls_server.kill()
    await eventually(lambda: not bus.connected)
    await tls_server.start()
    assert tls_server.port == port
    await eventually(lambda: bus.connected)
    await bus.close()


async def test_a_server_of_another_authority_is_not_trusted(
    tls_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_bus, "CONNECT_S", 1.0)
    other = tmp_path / "other"
    other.mkdir()
    certificates.write(other)
    for tls in ({}, {"nats_tls_ca_file": str(other / "ca.crt")}):
        with pytest.raises(Unavailable):
            await Bus.connect(as_registry(tls_server, tmp_path, **tls), "r", inbox="registry")


async def test_nothing_is_sent_to_a_server_without_tls(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_bus, "CONNECT_S", 1.0)
    heard = bytearray()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "x", "version": "2.11.0", "proto": 1, "headers": True, "max_payload": 1024, "auth_required": True}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        with contextlib.suppress(OSError):
            heard.extend(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    secret = tmp_path / "secret"
    secret.write_text("very-secret")
    host, port = server.sockets[0].getsockname()[:2]
    config = BusConfig(
        nats_url=f"nats://{host}:{port}", nats_user="u", nats_password_file=str(secret), nats_tls_ca_file=str(made / "ca.crt")
    )
    with pytest.raises(Unavailable):
        await Bus.connect(config, "x")
    assert not heard, "neither the password nor anything else"
    server.close()


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ({"nats_tls_ca_file": "/nowhere"}, "--nats-tls-ca-file"),
        ({"nats_tls_cert_file": "nats.crt"}, "belong together"),
        ({"nats_tls_cert_file": "ca.crt", "nats_tls_key_file": "nats.key"}, "--nats-tls-cert-file"),
    ],
)
def test_what_cannot_be_used_is_named(made: Path, tls: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BusConfig(**{name: str(made / value) for name, value in tls.items()}).nats_tls()


# ---- HTTP


async def test_the_gateway_speaks_https(
    mesh: Mesh, http: aiohttp.ClientSession, nats_url: str, tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"tls_cert_file": str(made / "gateway.crt"), "tls_key_file": str(made / "gateway.key")}
    mesh.say("x")
    async with running_gateway(nats_url, tmp_path, instance_id="g2", **files) as gateway:
        await eventually(lambda: not gateway.not_ready())
        url = f"https://localhost:{gateway.port}"
        trust = ssl.create_default_context(cafile=str(made / "ca.crt"))
        body = {"model": "demo", "prompt": "x", "stream": True}
        async with http.post(f"{url}/v1/completions", json=body, ssl=trust) as answer:
            assert answer.status == 200 and b"[DONE]" in await answer.read()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"{url}/health")
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://localhost:{gateway.port}/health")
        monkeypatch.setenv("MOTET_CA_FILE", str(made / "ca.crt"))
        async with Client(url) as client:
            assert (await client.models())[0]["id"] == "demo"


async def test_a_certificate_without_its_key_is_a_configuration_error(nats_url: str, tmp_path: Path, made: Path) -> None:
    for files in (
        {"tls_cert_file": str(made / "gateway.crt")},
        {"tls_cert_file": str(made / "gateway.crt"), "tls_key_file": str(made / "nats.key")},
    ):
        with pytest.raises(ConfigError, match="--tls-cert-file"):
            async with running_gateway(nats_url, tmp_path, **files):
                pass


async def test_an_authority_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_CA_FILE", "/nowhere")
    with pytest.raises(ApiError, match="MOTET_CA_FILE"):
        async with Client("https://x"):
            pass
