"""The command line against a running stack."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from motet.examples.demo.tasks import TASKS
from tests.e2e.live import BASE, DEMO, ROOT, LiveStack
from tests.support import eventually


def motet(stack: LiveStack, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "motet", *words, "--url", stack.facts().urls[0]]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT, input=text)


def test_chat_answers_one_message(stack: LiveStack) -> None:
    done = motet(stack, "chat", "--model", "upper-case", "hello there")
    assert (done.returncode, done.stdout.strip()) == (0, "HELLO THERE"), done.stderr


def test_chat_reads_a_conversation_from_its_input(stack: LiveStack) -> None:
    done = motet(stack, "chat", "--model", "upper-case", text="hello there\n/new\ngood morning\n")
    assert [line.strip() for line in done.stdout.splitlines()] == ["HELLO THERE", "GOOD MORNING"], done.stderr


def test_chat_prints_json_for_scripts(stack: LiveStack) -> None:
    done = motet(stack, "chat", "--model", "upper-case", "--json", "hello there")
    body = json.loads(done.stdout)
    assert body["choices"][0]["message"]["content"].strip() == "HELLO THERE"
    assert body["usage"]["completion_tokens"] > 0


def test_complete_uses_the_base_model_by_default(stack: LiveStack) -> None:
    done = motet(stack, "complete", "--json", "hello there\n")
    assert json.loads(done.stdout)["model"] == BASE


def test_an_unknown_model_is_one_line_and_status_one(stack: LiveStack) -> None:
    done = motet(stack, "chat", "--model", "nobody", "hello")
    assert done.returncode == 1
    assert "nobody" in done.stderr and "Traceback" not in done.stderr


def test_adapters_are_listed_for_people_and_for_scripts(stack: LiveStack) -> None:
    shown = motet(stack, "adapters", "list")
    listed = json.loads(motet(stack, "adapters", "list", "--json").stdout)["data"]
    assert {task.adapter for task in TASKS} <= {card["name"] for card in listed}
    assert all(card["name"] in shown.stdout for card in listed)


def test_an_adapter_is_added_shown_aliased_and_removed(stack: LiveStack) -> None:
    added = motet(stack, "adapters", "add", "cli-added", str(DEMO / "adapters" / "upper-case"))
    assert added.returncode == 0 and "added cli-added" in added.stdout, added.stderr
    assert motet(stack, "chat", "--model", "cli-added", "hello there").stdout.strip() == "HELLO THERE"
    again = motet(stack, "adapters", "add", "cli-added", str(DEMO / "adapters" / "rot13"))
    assert again.returncode == 1 and "cli-added" in again.stderr
    alias = motet(stack, "adapters", "alias", "cli-alias", "cli-added")
    assert alias.returncode == 0, alias.stderr
    shown = json.loads(motet(stack, "adapters", "show", "cli-alias", "--json").stdout)
    assert shown["alias_of"] == "cli-added" and shown["rank"] > 0
    for name in ("cli-alias", "cli-added"):
        assert motet(stack, "adapters", "rm", name).returncode == 0
    gone = motet(stack, "adapters", "show", "cli-added")
    assert gone.returncode == 1 and "cli-added" in gone.stderr


async def test_an_adapter_is_pinned_to_workers_and_unpinned(stack: LiveStack) -> None:
    name = TASKS[0].adapter
    pinned = motet(stack, "adapters", "pin", name, "--workers", "worker-1,worker-2")
    assert pinned.stdout.strip() == f"pinned {name} to worker-1, worker-2", pinned.stderr
    assert motet(stack, "adapters", "pin", name).stdout.strip() == f"pinned {name} to all workers"

    def resident() -> set[str]:
        return set(json.loads(motet(stack, "adapters", "show", name, "--json").stdout)["resident"].values())

    await eventually(lambda: asyncio.to_thread(lambda: resident() == {"device"}))
    assert "worker-9" in motet(stack, "adapters", "pin", name, "--workers", "worker-9").stderr
    assert motet(stack, "adapters", "unpin", name).stdout.strip() == f"unpinned {name}"


def test_a_path_on_the_server_begins_where_the_stack_was_started_and_is_shown_as_it_was_sent(stack: LiveStack) -> None:
    here = (DEMO / "adapters").relative_to(ROOT)
    added = motet(stack, "adapters", "add", "cli-path", str(here / "rot13"), "--on-server")
    assert added.returncode == 0, added.stderr
    shown = motet(stack, "adapters", "show", "cli-path", "--json")
    assert json.loads(shown.stdout)["source"] == "path:rot13" and str(ROOT) not in shown.stdout
    missing = motet(stack, "adapters", "add", "cli-none", str(here / "nothing"), "--on-server")
    assert missing.returncode == 1 and f"path {here}/nothing: No such file" in missing.stderr
    assert str(ROOT) not in missing.stderr
    assert motet(stack, "adapters", "rm", "cli-path").returncode == 0


def test_what_is_no_adapter_is_refused_before_anything_is_sent(stack: LiveStack, tmp_path: Path) -> None:
    done = motet(stack, "adapters", "add", "bad", str(tmp_path))
    assert done.returncode == 2
    assert "adapter_config.json" in done.stderr


def test_a_dry_run_shows_that_an_idle_mesh_has_nothing_to_move(stack: LiveStack) -> None:
    shown = motet(stack, "rebalance", "--dry-run")
    assert shown.returncode == 0 and "nothing to move" in shown.stdout, shown.stderr
    (plan,) = json.loads(motet(stack, "rebalance", "--dry-run", "--json").stdout)
    assert plan["base_model"] == BASE and plan["moves"] == []


def test_status_shows_the_workers(stack: LiveStack) -> None:
    shown = motet(stack, "status")
    assert shown.returncode == 0, shown.stderr
    assert "worker-1" in shown.stdout and "worker-2" in shown.stdout
    status = json.loads(motet(stack, "status", "--json").stdout)
    assert {worker["worker_id"] for worker in status["workers"]} == {"worker-1", "worker-2"}


async def test_a_durable_request_published_by_the_example_gets_its_result(stack: LiveStack) -> None:
    facts = stack.facts()
    for arguments in (
        ["publish_nats.py", "--url", facts.nats_url, "--user", "upstream", "--model", "upper-case", "hello there"],
        ["publish_raw.py", *facts.nats_url.removeprefix("nats://").split(":"), "upper-case", "hello there", "upstream"],
    ):
        secret = Path(facts.credentials_dir) / "upstream.password"
        tail = ["--password-file", str(secret)] if arguments[0] == "publish_nats.py" else [str(secret)]
        script, *rest = arguments
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, str(ROOT / "examples" / "clients" / script), *rest, *tail],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["status"] == "ok"
        assert result["response"]["choices"][0]["message"]["content"].strip() == "HELLO THERE"
