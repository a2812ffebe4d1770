"""The steps of `make compose-test`, in order; each checks one promise and reports what it saw."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

from motet.examples.demo.tasks import TASKS
from tests.compose import streams
from tests.compose.engine import OURS, ROOT, Project, image_mib, run, works

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import openai

STREAMS = 48
CLIENTS = ROOT / "examples" / "clients"
SECRETS = {  # what is mounted where it is not the service's password alone
    "nats": {"nats_conf", "nats.key"},
    "gateway": {"gateway_password", "gateway.key", "api_keys"},
}
MESH_MIB, WORKER_MIB = 150, 1500  # what Motet and its dependencies add to the base image
TROUBLE = ("resumed", "preemptions", "refused", "errors", "evictions")
PICTURES = ("_pictures_", "_image_")  # in metrics that a mesh for texts leaves empty
PROMETHEUS = """services:
  prometheus: # the image cannot be pulled here: this machine's own binary, in a container of the mesh image
    image: motet-mesh
    command: ["/opt/prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/tmp/prometheus"]
    volumes: ["{binary}:/opt/prometheus:ro"]
    healthcheck: {{ test: ["CMD", "python", "-m", "motet.cli.health", "http://127.0.0.1:9090/-/ready"] }}
"""


class Broken(Exception):
    """A promise was not kept."""


class Proof:
    """Runs all steps on a project; `rows` is the table, `figures` the JSON."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.rows: list[tuple[str, float, str, str]] = []
        self.figures: dict[str, float] = {"services_healthy": 0, "answers_right": 0.0, "lost": 0, "changed": 0}
        self.services = list(OURS)
        self.quiet: list[streams.Outcome] = []
        self.stored = ""  # what was answered to the durable request proof-0
        self.bodies = streams.requests(STREAMS)

    def run(self) -> None:
        """Run every step, also after a missed promise, but none after a failed build. Removes the project at the end."""
        steps: list[tuple[str, Callable[[], str]]] = [
            ("build the images", self.build),
            ("what Motet adds to the base image", self.sizes),
            ("up, all healthy", self.up),
            ("openai-python, every adapter", self.answers),
            ("both NATS publishers", self.publishers),
            ("shut in: root, capabilities, secrets", self.isolation),
            ("three workers, two gateways", self.scale),
            ("48 streams, nothing happens", self.undisturbed),
            ("48 streams, a worker is killed", lambda: self.disturbed("worker")),
            ("48 streams, the broker is killed", lambda: self.disturbed("nats")),
            ("48 streams, the scheduler is killed", lambda: self.disturbed("scheduler")),
            ("48 streams, a gateway is killed", self.gateway_dies),
            ("down and up again", self.down_and_up),
            ("Prometheus scrapes, the board has data", self.prometheus),
            ("workers fail: status and alert say so", self.workers_fail),
        ]
        try:
            for name, step in steps:
                began = time.monotonic()
                try:
                    seen, kept = step(), "yes"
                except (Broken, RuntimeError, AssertionError, OSError) as error:
                    seen, kept = str(error), "NO"
                took_s = time.monotonic() - began
                print(f"{kept:>3}  {took_s:6.1f} s  {name}: {seen}", file=sys.stderr, flush=True)
                self.rows.append((name, round(took_s, 1), seen.splitlines()[0][:100], kept))
                if kept == "NO" and step == self.build:
                    break
            if any(kept == "NO" for *_, kept in self.rows):
                print(self.project.compose("logs", "--tail", "60", "--no-color"), file=sys.stderr)
        finally:
            self.project.compose("down", "-v", "--timeout", "10")

    # ---- it starts

    def build(self) -> str:
        self.project.home.mkdir(exist_ok=True)
        made = ("--tls", "--tls-files", "/run/secrets")
        run(sys.executable, "-m", "motet", "nats-config", "--out", str(self.project.secrets), *made)
        for image in ("prometheus", "grafana"):
            try:
                self.project.compose("pull", "-q", image)
                self.services.append(image)
            except RuntimeError:
                self._stand_in(image)
        self.project.compose("build", *OURS)
        return f"on {self.project.env['MOTET_BASE_IMAGE']}"

    def sizes(self) -> str:
        """Base images differ in size by more than Motet's own layers may: what counts is the difference."""
        base = image_mib(self.project.env["MOTET_BASE_IMAGE"])
        sizes = {name: image_mib(f"motet-{name}") for name in ("nats", "mesh", "predictor", "worker-cpu")}
        added = {name: round(mib - base, 1) for name, mib in sizes.items()}
        self.figures |= {"image_mib_mesh": sizes["mesh"], "image_mib_worker_cpu": sizes["worker-cpu"]}
        self.figures |= {"image_mib_base": base, "added_mib_mesh": added["mesh"], "added_mib_worker_cpu": added["worker-cpu"]}
        promise(added["mesh"] <= MESH_MIB and added["worker-cpu"] <= WORKER_MIB, f"too large: {added} MiB")
        return f"base {base:.0f} MiB; " + ", ".join(f"{name} {mib:+.0f}" for name, mib in added.items())

    def _stand_in(self, image: str) -> None:
        binary = shutil.which(image)
        if image != "prometheus" or binary is None:
            print(f"  {image}: its image cannot be pulled here, left out", file=sys.stderr)
            return
        override = self.project.home / "prometheus.yaml"
        override.write_text(PROMETHEUS.format(binary=binary))
        self.project.files.append(override)
        self.services.append(image)

    def up(self) -> str:
        began = time.monotonic()
        self.project.compose("up", "-d", "--no-build", *self.services)
        self.wait_healthy()
        self.figures["services_healthy"] = len(self.services)
        return f"{len(self.services)} services healthy {time.monotonic() - began:.0f} s after `up`"

    def wait_healthy(self, **more: int) -> None:
        """Wait until one container of every service is healthy, or as many as `more` says."""
        wanted = dict.fromkeys(self.services, 1) | more
        self.wait(lambda: self.project.healthy() == wanted, f"healthy {wanted}", 120.0)

    def wait(self, look: Callable[[], Any], what: str, within_s: float = 90.0) -> Any:
        """The result of `look` as soon as it is true."""
        deadline = time.monotonic() + within_s
        while not (found := look()):
            if time.monotonic() > deadline:
                raise Broken(f"no {what} within {within_s:.0f} s")
            time.sleep(0.5)  # time: between two looks
        return found

    # ---- it answers

    def answers(self) -> str:
        return f"{self.ask(self.project.url('gateway', 8000))} of {len(TASKS)} answers right, streamed; base model listed"

    def ask(self, url: str, *, models: dict[str, str] | None = None) -> int:
        """Right answers over all adapters (or `models`: name -> task)."""
        right = 0
        http = openai.DefaultHttpxClient(verify=self.project.trust())
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key=self.project.key, max_retries=0, timeout=60, http_client=http
        ) as client:
            listed = {card.id for card in client.models.list()}
            asked = models or {task.adapter: task.name for task in TASKS}
            promise({"motet-demo", *asked} <= listed, f"listed: {sorted(listed)}")
            for model, name in asked.items():
                task = next(task for task in TASKS if task.name == name)
                stream = client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": task.prompt("hello there")}], temperature=0, stream=True
                )
                said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
                right += said.strip() == task.expected("hello there")
        self.figures["answers_right"] = right / len(asked)
        promise(right == len(asked), f"{right} of {len(asked)} answers right")
        return right

    def publishers(self) -> str:
        said, _ = self._publish("proof-nats-py", "upper-case", "hello queue").communicate(timeout=120)
        raw = [str(CLIENTS / "publish_raw.py"), "127.0.0.1", "14222", "reverse", "hello", "upstream", self._upstream()]
        plain = run(sys.executable, *raw, env=os.environ | {"SSL_CERT_FILE": str(self.project.ca)})
        answers = [json.loads(one)["response"]["choices"][0]["message"]["content"].strip() for one in (said, plain)]
        promise(answers == ["HELLO QUEUE", "olleh"], f"answers: {answers}")
        return f"nats-py: {answers[0]!r}, plain socket: {answers[1]!r}"

    def isolation(self) -> str:
        secrets = {path.name: path.read_text().strip() for path in self.project.secrets.glob("*.password")}
        secrets["api-keys"] = self.project.key
        for one in self.project.containers():
            service, host = one["Config"]["Labels"]["com.docker.compose.service"], one["HostConfig"]
            described = json.dumps(one)
            promise(not any(secret in described for secret in secrets.values()), f"{service}: a password can be inspected")
            if service not in OURS:
                continue
            promise(host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], f"{service}: {host['CapDrop']}")
            promise("no-new-privileges:true" in host["SecurityOpt"], f"{service}: may gain privileges")
            status = self.project.inside(one, "grep", "-E", "^(Uid|CapEff|NoNewPrivs)", "/proc/1/status").stdout
            promise("Uid:\t10001" in status and "CapEff:\t0000000000000000" in status, f"{service}: {status}")
            writes = self.project.inside(one, "sh", "-c", "touch /opt/x /home/motet/x")
            promise(writes.returncode != 0 and writes.stderr.count("Read-only file system") == 2, f"{service}: {writes.stderr}")
            mounted = {
                name for name in self.project.inside(one, "ls", "/run/secrets").stdout.split() if not name.endswith(".crt")
            }
            promise(mounted == SECRETS.get(service, {f"{service}_password"}), f"{service} has secrets {mounted}")
        return "uid 10001, read-only root, no capabilities, its own secrets only, by file; TLS and API keys on"

    # ---- it heals

    def scale(self) -> str:
        self.project.compose("up", "-d", "--no-build", "--scale", "worker=3", "--scale", "gateway=2", *self.services)
        self.wait_healthy(worker=3, gateway=2)
        self.wait_workers(3)
        return f"gateways at {', '.join(self.urls())}, each sees 3 workers"

    def urls(self) -> list[str]:
        """The gateways, in the order of `containers`. A restarted one may have another port of its range."""
        return [self.project.url("gateway", 8000, one) for one in self.project.containers("gateway")]

    def get(self, url: str, body: dict[str, Any] | None = None) -> Any:
        """A gateway's answer to a GET, or to a POST of `body`."""
        return ask(url, body, key=self.project.key, trust=self.project.trust())

    async def stream(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[streams.Outcome]:
        """All streams over all gateways at once."""
        return await streams.run(self.urls(), self.bodies, self.project.key, self.project.trust(), meanwhile)

    def wait_workers(self, count: int, within_s: float = 90.0) -> None:
        """Until every gateway's scheduler sees `count` live workers."""
        urls = self.urls()

        def all_seen() -> bool:
            known = [(self.get(f"{url}/v1/status") or {}).get("workers", []) for url in urls]
            return all(sum(not worker["stale"] for worker in workers) == count for workers in known)

        self.wait(all_seen, f"{count} live workers", within_s)

    def undisturbed(self) -> str:
        self.quiet = asyncio.run(self.stream())
        failed = [one.error for one in self.quiet if one.error]
        promise(not failed, f"{len(failed)} failed: {failed[:3]}")
        return f"{STREAMS} whole, longest gap {max(one.longest_gap_s for one in self.quiet):.2f} s"

    def disturbed(self, service: str) -> str:
        """A process of `service` dies while all streams run: none is lost, no character changes."""

        async def kill() -> None:
            await asyncio.to_thread(self.project.kill_process, self.project.containers(service)[0])

        outcomes = asyncio.run(self.stream(kill))
        lost = [one.error for one in outcomes if one.error]
        changed = sum(not one.error and one.text != quiet.text for one, quiet in zip(outcomes, self.quiet, strict=True))
        self.figures["lost"] += len(lost)
        self.figures["changed"] += changed
        promise(not lost and not changed, f"{len(lost)} lost, {changed} changed: {lost[:2]}")
        self.wait_healthy(worker=3, gateway=2)
        self.wait_workers(3)
        return f"0 lost, 0 changed, longest gap {max(one.longest_gap_s for one in outcomes):.2f} s, healthy again"

    def gateway_dies(self) -> str:
        """A gateway dies.

        Its streams end with an error that a client notices; the other gateway and durable requests continue.
        """
        durable = [f"proof-{number}" for number in range(8)]
        publishing: list[subprocess.Popen[str]] = []

        async def kill() -> None:
            publishing.extend(self._publish(name) for name in durable)
            await asyncio.to_thread(self.project.kill_process, victim)

        victim = self.project.containers("gateway")[0]
        outcomes = asyncio.run(self.stream(kill))
        owned, others = outcomes[0::2], outcomes[1::2]
        silent = sum(not one.error and one.text != quiet.text for one, quiet in zip(owned, self.quiet[0::2], strict=True))
        ended = sum(bool(one.error) for one in owned)
        lost = sum(bool(one.error) for one in others)
        changed = sum(not one.error and one.text != quiet.text for one, quiet in zip(others, self.quiet[1::2], strict=True))
        said = [process.communicate(timeout=120)[0] for process in publishing]
        done, self.stored = sum(process.returncode == 0 for process in publishing), said[0]
        self.figures["lost"] += lost + len(durable) - done
        self.figures["changed"] += changed + silent
        promise(ended > 0 and not silent, f"{ended} of its streams ended with an error, {silent} silently short")
        promise(not lost and not changed, f"the other gateway: {lost} lost, {changed} changed")
        promise(done == len(durable), f"{done} of {len(durable)} durable requests answered")
        self.wait_healthy(worker=3, gateway=2)
        kinds = {one.error.partition(":")[0] for one in owned if one.error}
        return f"its {ended} streams end with {' or '.join(sorted(kinds))}; the other's 24 and 8 durable ones are whole"

    def _publish(self, name: str, model: str = "reverse", text: str = "hello there") -> subprocess.Popen[str]:
        argv = [
            sys.executable,
            str(CLIENTS / "publish_nats.py"),
            "--url",
            "tls://127.0.0.1:14222",
            "--ca-file",
            str(self.project.ca),
        ]
        argv += ["--user", "upstream", "--password-file", self._upstream(), "--id", name, "--model", model, text]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    def _upstream(self) -> str:
        return str(self.project.secrets / "upstream.password")

    def down_and_up(self) -> str:
        """Adapters that were added while it ran, and results that no client has fetched, are still there."""
        with_alias = {"name": "shouting", "path": "/adapters/upper-case"}
        self.get(f"{self.urls()[0]}/v1/adapters", with_alias)
        self.project.compose("down", "--timeout", "20")
        promise(not self.project.containers(), "containers are left")
        self.project.compose("up", "-d", "--no-build", *self.services)
        self.wait_healthy()
        self.ask(self.urls()[0], models={"shouting": "upper-case", "reverse": "reverse"})
        again, _ = self._publish("proof-0").communicate(timeout=120)
        promise(again == self.stored, f"proof-0 was answered {self.stored!r} and is now {again!r}")
        return "an adapter added by HTTP answers; a request published again gets its stored result"

    # ---- it is watched

    def prometheus(self) -> str:
        if "prometheus" not in self.services:
            return "left out: no image and no binary"
        asyncio.run(self.stream())
        url = self.project.url("prometheus", 9090)
        targets = self.wait(lambda: self._targets(url), "targets that answer")
        rules = [rule for group in query(url, "rules")["groups"] for rule in group["rules"]]
        promise(len(rules) >= 6 and all(rule["health"] == "ok" for rule in rules), f"rules: {rules}")
        if shutil.which("promtool"):
            run("promtool", "test", "rules", "tests/compose/alerts_test.yaml")
        board = json.loads((ROOT / "compose/grafana/dashboards/motet.json").read_text())
        asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
        # what counts trouble may be empty: there was none
        needed = [expr for expr in asked if not any(word in expr for word in (*TROUBLE, *PICTURES))]
        self.wait(lambda: all(_has_data(url, expr) for expr in needed), "data for the board")
        found = sum(_has_data(url, expr) for expr in asked)
        return f"{targets} targets up, {len(rules)} rules loaded, {found} of {len(asked)} queries of the board have data"

    def _targets(self, url: str) -> int:
        active = query(url, "targets")["activeTargets"]
        up = [one for one in active if one["health"] == "up"]
        return len(up) if len(up) == len(active) >= len(OURS) - 1 else 0

    def workers_fail(self) -> str:
        """Workers crash in a loop. The gateway, `motet status` and an alert name them with their last log lines."""
        self.project.compose("stop", "worker")
        broken = (
            "run",
            "-d",
            "--no-deps",
            "-e",
            "MOTET_MAX_MODEL_LEN=1000000",
            "-e",
            "MOTET_INSTANCE_ID=worker-broken",
            "worker",
        )
        started = self.project.compose(*broken).splitlines()[-1]
        try:
            words = "worker-broken failed"
            told = self.wait(lambda: self._not_ready(words), f"reason that names {words!r}")
            promise("--max-model-len: 1000000 is more than the model's" in told, told)
            [gateway] = self.project.containers("gateway")
            access = ("env", f"MOTET_API_KEY={self.project.key}", "MOTET_CA_FILE=/run/secrets/ca.crt")
            status = self.project.inside(gateway, *access, "motet", "status", "--url", "https://127.0.0.1:8000")
            promise(status.returncode == 1 and words in " ".join(status.stdout.split()), status.stdout + status.stderr)
            if "prometheus" in self.services:
                url = self.project.url("prometheus", 9090)
                self.wait(lambda: _firing(url, "MotetNoWorker"), "alert MotetNoWorker")
        finally:
            works("docker", "rm", "-f", started)
        return told[:90] + ("; MotetNoWorker fires" if "prometheus" in self.services else "")

    def _not_ready(self, words: str) -> str:
        answer = self.get(f"{self.urls()[0]}/ready") or {}
        return next((reason for reason in answer.get("reasons", []) if words in reason), "")


def promise(kept: bool, seen: str) -> None:
    """Raises Broken with what was seen instead."""
    if not kept:
        raise Broken(seen)


def ask(url: str, body: dict[str, Any] | None = None, *, key: str = "", trust: ssl.SSLContext | None = None) -> Any:
    """The JSON answer to a GET, or to a POST of `body`, also of an error; None without an answer."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=60, context=trust) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())
    except OSError:
        return None


def query(url: str, what: str, **parameters: str) -> Any:
    """`data` of Prometheus's HTTP API."""
    answer = ask(f"{url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}")
    promise(answer is not None and answer["status"] == "success", f"{what} {parameters}: {answer}")
    return answer["data"]


def _has_data(url: str, expr: str) -> bool:
    return bool(query(url, "query", query=expr)["result"])


def _firing(url: str, alert: str) -> bool:
    alerts = query(url, "alerts")["alerts"]
    return any(one["labels"]["alertname"] == alert and one["state"] == "firing" for one in alerts)
