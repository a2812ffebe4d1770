"""The command line: fast to start, options from the config structs, errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from motet.cli.main import COMMANDS, cli, service_command
from motet.shared.config import fields

ROOT = Path(__file__).resolve().parents[2]
SERVICES = tuple(COMMANDS["Single services"])
LOCKS = [f"requirements{part}.txt" for part in ("-mesh", "", "-torch", "-images", "-dev")]


def motet(*words: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "motet", *words], capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)


def test_help_lists_every_command_without_importing_one() -> None:
    program = (
        "import sys; from motet.cli.main import cli; "
        "cli(['--help'], standalone_mode=False); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    for section in COMMANDS.values():
        for name in section:
            assert f"  {name} " in done.stdout
    loaded = set(done.stderr.split())
    assert not loaded & {
        "torch",
        "transformers",
        "nats",
        "fastapi",
        "aiohttp",
        "httpx2",
        "motet.cli.up",
        "motet.services.gateway",
    }


@pytest.mark.parametrize("name", [name for section in COMMANDS.values() for name in section])
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Usage: cli {name}" in result.output


@pytest.mark.parametrize("kind", SERVICES)
def test_a_services_options_are_its_configuration(kind: str) -> None:
    module = __import__(f"motet.services.{kind}.config", fromlist=["config"])
    declared = {field.name for field in fields(getattr(module, f"{kind.capitalize()}Config"))}
    options = [option for option in service_command(kind).params if option.name != "help_all"]
    assert {option.name for option in options} == declared
    assert all(option.default is None for option in options), "defaults belong to the struct, or variables would not count"


def test_a_wrong_value_is_refused_by_name_before_anything_starts() -> None:
    done = motet("scheduler", "--attempts", "0")
    assert done.returncode == 2
    assert "--attempts" in done.stderr


def test_a_service_that_cannot_reach_nats_says_so() -> None:
    done = motet("predictor", "--nats-url", "nats://127.0.0.1:1")
    assert done.returncode == 1
    assert "nats://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_up_refuses_a_model_that_is_not_there() -> None:
    done = motet("up", "--model", "/nowhere/model")
    assert done.returncode == 2
    assert "/nowhere/model" in done.stderr


def test_up_refuses_credentials_without_a_server() -> None:
    done = motet("up", "--model", ".", "--nats-user", "me")
    assert done.returncode == 2
    assert "--nats-url" in done.stderr


@pytest.mark.parametrize(
    "words",
    [("chat", "hello"), ("complete", "hello"), ("adapters", "list"), ("status",)],
    ids=["chat", "complete", "adapters", "status"],
)
def test_without_a_gateway_there_is_one_helpful_line(words: tuple[str, ...]) -> None:
    done = motet(*words, "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "motet up" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_shell_completes_options_and_their_values() -> None:
    def complete(line: str) -> list[str]:
        words = {"_MOTET_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = subprocess.run(
            [sys.executable, "-m", "motet"], env={**os.environ, **words}, capture_output=True, text=True, cwd=ROOT, check=True
        )
        return [item.partition(",")[2] for item in done.stdout.splitlines()]

    assert "status" in complete("motet st")
    assert "--max-running" in complete("motet up --max-r")
    assert complete("motet up --engine ") == ["native", "vllm", "images"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("staus",), "status"),
        (("serve", "model"), "Did you mean 'motet up'?"),
        (("adapters", "lst"), "list"),
        (("predictor", "trian"), "train"),
        (("up", "--max-runing", "3"), "--max-running"),
    ],
)
def test_an_unknown_word_is_answered_with_the_one_that_it_resembles(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert "No such" in result.output and said in result.output


def test_the_locks_pin_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    mesh, worker, torch, images, dev = (pins(name) for name in LOCKS)
    run = mesh | worker | torch
    assert not any(pin.startswith("torch==") for pin in mesh), "services without an engine do without it"
    pinned = {name: version for name, version in (pin.split("==") for pin in run)}
    for need in map(Requirement, project["dependencies"]):
        assert need.specifier.contains(pinned[need.name]), f"requirements.txt lacks {need}: `make lock`"
    extras = project["optional-dependencies"]
    pinned |= {name: version for name, version in (pin.split("==") for pin in images)}
    for need in map(Requirement, extras["images"]):
        assert need.specifier.contains(pinned[need.name]), f"requirements-images.txt lacks {need}: `make lock`"
    pinned |= {name: version for name, version in (pin.split("==") for pin in dev)}
    for need in map(Requirement, extras["plots"]):
        assert need.specifier.contains(pinned[need.name]), f"requirements-dev.txt lacks {need}: `make lock`"
    assert set(extras["dev"]) <= run | images | dev, "requirements-dev.txt is older than pyproject.toml"
    assert all(line.count("==") == 1 for line in run | images | dev)


def test_each_package_is_pinned_in_one_lock() -> None:
    names = [pin.split("==")[0] for lock in LOCKS for pin in pins(lock)]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def pins(name: str) -> set[str]:
    lines = (ROOT / name).read_text().splitlines()
    return {line.removesuffix(" \\") for line in lines if line and not line.startswith(("#", "-r", " "))}


def test_every_locked_file_but_torchs_has_hashes() -> None:
    for name in set(LOCKS) - {"requirements-torch.txt"}:
        text = (ROOT / name).read_text()
        assert all(f"{pin} \\\n    --hash=sha256:" in text for pin in pins(name)), name
