"""A Compose project for the test: its images, its containers, and faults in them."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "compose" / "compose.yaml"
BASE_IMAGE = "python:3.11.13-slim-bookworm"
OWN_BASE_IMAGE = "motet-base:bookworm"
OURS = ("nats", "registry", "predictor", "scheduler", "gateway", "worker")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
HELP = {
    "docker": "a Docker client and engine (Debian: `apt-get install docker.io`, then start `dockerd` if no init system does)",
    "compose": "Docker Compose v2 as `docker compose` (Debian 13's package docker-compose; it installs on Debian 12 as well)",
    "buildx": "BuildKit as `docker buildx` (Debian 13's package docker-buildx; it installs on Debian 12 as well)",
    "debootstrap": f"the base image {BASE_IMAGE}, which cannot be pulled here, or root and `debootstrap` to make one like it",
}


class Missing(Exception):
    """This machine lacks something. The message says how to get it."""


def run(*argv: str, env: dict[str, str] | None = None, quiet: bool = True, timeout_s: float = 1800) -> str:
    """Run a command and return its standard output. A failure shows the end of both streams."""
    done = subprocess.run(argv, env=env, capture_output=quiet, text=True, cwd=ROOT, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(argv)}: exit {done.returncode}\n{(done.stdout or '')[-3000:]}\n{(done.stderr or '')[-6000:]}"
        )
    return (done.stdout or "").strip()


def works(*argv: str) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, timeout=120).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def require_engine() -> None:
    """Raises Missing with what to install."""
    if not works("docker", "info"):
        raise Missing(HELP["docker"])
    for plugin in ("compose", "buildx"):
        if not works("docker", plugin, "version"):
            raise Missing(HELP[plugin])


def base_image() -> str:
    """An image to build on: the Dockerfile's own, or one like it made by debootstrap where none can be pulled."""
    named = os.environ.get("MOTET_BASE_IMAGE")
    if named:
        return named
    for image in (BASE_IMAGE, OWN_BASE_IMAGE):
        if works("docker", "image", "inspect", image):
            return image
    if works("docker", "pull", BASE_IMAGE):
        return BASE_IMAGE
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise Missing(HELP["debootstrap"])
    with tempfile.TemporaryDirectory() as folder:
        _debootstrap(Path(folder) / "root")
        archive = Path(folder) / "base.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(Path(folder) / "root", arcname=".")
        certificates = "ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"
        run("docker", "import", "-c", certificates, str(archive), OWN_BASE_IMAGE)
    return OWN_BASE_IMAGE


def _debootstrap(root: Path) -> None:
    """Debian bookworm with Python 3.11 and this machine's certificate authorities, without what the slim images leave out."""
    packages = (
        "ca-certificates,python3,python3-venv,libpython3-dev"  # the slim images have Python's headers, which vLLM compiles with
    )
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root))
    for certificate in Path("/usr/local/share/ca-certificates").glob("*.crt"):
        shutil.copy(certificate, root / "usr/local/share/ca-certificates")
    run("chroot", str(root), "update-ca-certificates")
    (root / "usr/bin/python").symlink_to("python3")
    for leftover in ("var/lib/apt/lists", "var/cache/apt", "usr/share/doc", "usr/share/locale", "usr/share/man"):
        shutil.rmtree(root / leftover, ignore_errors=True)
        (root / leftover).mkdir(parents=True)


def torch_index() -> str:
    """The index that the worker's image takes torch's CPU build from; where it is out of reach, pip's own configuration
    finds a wheel, which goes into compose/wheels."""
    named = os.environ.get("TORCH_INDEX", TORCH_INDEX)
    try:
        with urllib.request.urlopen(f"{named}/torch/", timeout=5):
            return named
    except (OSError, ValueError):
        wheels = ROOT / "compose" / "wheels"
        pin = (ROOT / "requirements-torch.txt").read_text().splitlines()[-1]
        if not list(wheels.glob(f"torch-{pin.partition('==')[2]}*")):
            run(sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(wheels), pin)
        return ""


class Project:
    """`docker compose` on compose/compose.yaml with ports, secrets and volumes of its own."""

    def __init__(self, home: Path, name: str = "motet-proof") -> None:
        self.name, self.home = name, home
        self.files = [COMPOSE_FILE]
        self.secrets = home / "secrets"
        self.env = os.environ | {
            "MOTET_SECRETS_DIR": str(self.secrets),
            "MOTET_BASE_IMAGE": base_image(),
            "TORCH_INDEX": torch_index(),
            "MOTET_HTTP_PORT": "18000-18003",
            "MOTET_NATS_PORT": "14222",
            "MOTET_PROMETHEUS_PORT": "19090",
            "MOTET_GRAFANA_PORT": "13000",
            "DOCKER_BUILDKIT": "1",
        }

    @property
    def ca(self) -> Path:
        """The authority of the stack's certificates."""
        return self.secrets / "ca.crt"

    @property
    def key(self) -> str:
        """An administrator's API key."""
        return (self.secrets / "api-keys").read_text().split()[0]

    def trust(self) -> ssl.SSLContext:
        """A TLS context for clients that trusts this authority alone."""
        return ssl.create_default_context(cafile=str(self.ca))

    def compose(self, *words: str) -> str:
        files = [word for file in self.files for word in ("-f", str(file))]
        return run("docker", "compose", "-p", self.name, *files, "--profile", "cpu", *words, env=self.env)

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """`docker inspect` of the running containers of one service, or of all."""
        ids = self.compose("ps", "-q", *([service] if service else [])).split()
        return json.loads(run("docker", "inspect", *ids)) if ids else []

    def healthy(self) -> dict[str, int]:
        """The containers whose health check reports healthy, by service."""
        found: dict[str, int] = {}
        for one in self.containers():
            service = one["Config"]["Labels"]["com.docker.compose.service"]
            found[service] = found.get(service, 0) + (one["State"].get("Health", {}).get("Status") == "healthy")
        return found

    def url(self, service: str, port: int, container: dict[str, Any] | None = None) -> str:
        """Where a container's port is to be found on this machine; gateways speak https."""
        one = container or self.containers(service)[0]
        bound = one["NetworkSettings"]["Ports"][f"{port}/tcp"][0]
        return f"{'https' if service == 'gateway' else 'http'}://{bound['HostIp']}:{bound['HostPort']}"

    def kill_process(self, container: dict[str, Any]) -> None:
        """SIGKILL to a container's first process, as a crash would end it: the restart policy brings it back.

        (After `docker kill` the engine would not restart the container, because it takes the end as intended.)
        """
        pid = json.loads(run("docker", "inspect", container["Id"]))[0]["State"]["Pid"]
        kill = ("--pid", "host", "--user", "0", "--entrypoint", "sh", "motet-mesh", "-c", f"kill -9 {pid}")
        run("docker", "run", "--rm", *kill)

    def inside(self, container: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
        """A command in a running container."""
        return subprocess.run(["docker", "exec", container["Id"], *words], capture_output=True, text=True, timeout=120)


def image_mib(name: str) -> float:
    """An image's size, all its layers together."""
    return round(int(run("docker", "image", "inspect", "-f", "{{.Size}}", name)) / 2**20, 1)
