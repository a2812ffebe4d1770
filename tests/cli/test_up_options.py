"""Promise: `motet up` takes flags first, then variables, then its file, and passes to services only what it was given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from motet.cli import up_options
from motet.cli.main import service_command
from motet.cli.options import config_of
from motet.cli.stack import Stack, StackOptions
from motet.cli.up import up
from motet.cli.up_options import declared, stack_options
from motet.examples.demo import BASE, DEMO
from motet.examples.demo_images import BASE as IMAGES_BASE
from motet.services.worker.engines.opening import ENGINES
from motet.shared.config import ConfigError, fields, load
from motet.shared.sockets import bound_socket
from tests.services.gateway.support_pictures import write_image_base
from tests.support_options import EVERY, SERVICES, value_of, values


def options(*words: str, **environ: str) -> StackOptions:
    """The options that a command line and variables give."""
    return stack_options(up.make_context("up", list(words)).params, environ)


def command(given: StackOptions, directory: Path, name: str) -> list[str]:
    """The command line of a process."""

    class Heard:
        def changed(self, name: str, state: Any, note: str) -> None:
            raise AssertionError

    stack = Stack(StackOptions(**{**{f: getattr(given, f) for f in given.__struct_fields__}, "data_dir": directory}), Heard())
    stack.listeners = [bound_socket("127.0.0.1", 0)]
    try:
        return stack.spec_for(name).argv(0)
    finally:
        stack.listeners[0].close()


@pytest.mark.parametrize(
    ("field", "words", "environ", "value"),
    [
        ("threads", (), {"MOTET_THREADS": "3"}, 3),
        ("threads", ("--threads", "2"), {"MOTET_THREADS": "3"}, 2),
        ("threads", (), {}, 0),
        ("port", (), {"MOTET_PORT": "9001"}, 9001),
        ("port", ("--port", "0"), {"MOTET_PORT": "9001"}, 0),
        ("host", (), {"MOTET_HOST": "::1"}, "::1"),
        ("drain_s", (), {"MOTET_DRAIN_S": "1.5"}, 1.5),
        ("tenants", (), {"MOTET_TENANTS": "a, b"}, ("a", "b")),
        ("tenants", ("--tenants", "c"), {"MOTET_TENANTS": "a,b"}, ("c",)),
        ("api_keys", (), {"MOTET_API_KEYS": "off"}, "off"),
        ("tls_key_file", (), {"MOTET_TLS_KEY_FILE": "k"}, "k"),
        ("workers", (), {"MOTET_WORKERS": "2"}, 2),
    ],
)
def test_flags_go_before_variables(field: str, words: tuple[str, ...], environ: dict[str, str], value: object) -> None:
    assert getattr(options("--demo", *words, **environ), field) == value


def test_a_variable_says_which_model_to_serve_unless_a_flag_does() -> None:
    model, name = {"MOTET_MODEL": str(DEMO / "model")}, {"MOTET_SERVED_MODEL_NAME": "mine"}
    assert options(**model).served_model_name == "model"
    assert options(**model, **name).served_model_name == "mine"
    assert options("--demo", MOTET_MODEL="/nowhere", **name).served_model_name == BASE
    with pytest.raises(ConfigError, match="--demo"):
        options()
    with pytest.raises(ConfigError, match="--demo"):
        options("--demo", "--model", "m")


def test_the_demo_reads_the_calls_of_its_own_adapter() -> None:
    assert options("--demo").given["tool_call_parser"] == "hermes"
    assert options("--demo", "--tool-call-parser", "mistral").given["tool_call_parser"] == "mistral"
    assert not options("--model", str(DEMO / "model")).given.get("tool_call_parser")


def test_the_image_demo_serves_its_model_by_the_image_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_options, "DEMO_IMAGES", tmp_path)
    monkeypatch.setitem(ENGINES, "images", ENGINES["native"])  # as a worker with motet[images] has it
    with pytest.raises(ConfigError, match=r"--demo-images: .*model_index.json is missing; .*demo_images.train"):
        options("--demo-images")
    write_image_base(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"--demo-images: .*adapters is missing"):
        options("--demo-images")
    (tmp_path / "adapters").mkdir()
    given = options("--demo-images", "--image-steps", "9")
    assert (given.served_model_name, given.adapters_dir, given.draws) == (IMAGES_BASE, str(tmp_path / "adapters"), True)
    assert command(given, tmp_path / "data", "worker-1").count("--engine") == 1
    assert {name: given.given[name] for name in ("engine", "image_steps", "image_guidance", "image_max_pixels", "threads")} == {
        "engine": "images",
        "image_steps": "9",
        "image_guidance": 2.0,
        "image_max_pixels": 256 * 256,
        "threads": 1,
    }
    for other in (("--demo",), ("--model", str(DEMO / "model"))):
        with pytest.raises(ConfigError, match="--demo-images: each says what to serve"):
            options("--demo-images", *other)


def test_an_image_base_is_run_by_the_image_engine_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "images", ENGINES["native"])
    model = write_image_base(tmp_path / "sd")
    given = options("--model", str(model))
    assert (given.draws, given.given["engine"], given.chats_missing) == (True, "images", "")
    assert "engine" not in options("--model", str(model), MOTET_ENGINE="native").given
    assert options("--demo").draws is False
    (model / "vae" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"vae/config.json is missing"):
        options("--model", str(model))


def test_a_variable_says_which_nats_to_use() -> None:
    assert options("--demo").bus is None
    bus = options("--demo", MOTET_NATS_URL="nats://bus:4222", MOTET_NATS_REPLICAS="3").bus
    assert bus is not None and (bus.nats_url, bus.nats_replicas) == ("nats://bus:4222", 3)
    assert options("--demo", MOTET_NATS_REPLICAS="3").bus is None, "the embedded server is one"


def test_a_value_that_does_not_fit_names_the_flag() -> None:
    for words in (("--port", "70000"), ("--quantization", "int3"), ("--tenants", "a.b"), ("--adapters-dir", "/nowhere")):
        with pytest.raises(ConfigError, match=words[0]):
            options("--demo", *words)


def test_a_worker_reads_its_variables_where_no_flag_was_given(tmp_path: Path) -> None:
    plain = command(options("--demo"), tmp_path, "worker-1")
    assert not {"--quantization", "--threads"} & set(plain)
    given = command(options("--demo", "--quantization", "int8", "--threads", "1"), tmp_path, "worker-1")
    assert given[given.index("--quantization") + 1] == "int8"
    assert given[given.index("--threads") + 1] == "1"


def test_workers_share_the_cores_unless_told_how_many_threads_to_use(tmp_path: Path) -> None:
    shared = command(options("--demo", "--workers", "64"), tmp_path, "worker-1")
    assert shared[shared.index("--threads") + 1] == "1"
    told = command(options("--demo", "--workers", "64", MOTET_THREADS="5"), tmp_path, "worker-1")
    assert told[told.index("--threads") + 1] == "5"


def test_a_gateway_gets_only_the_keys_and_certificates_that_were_given(tmp_path: Path) -> None:
    plain = command(options("--demo"), tmp_path, "gateway-1")
    assert not {"--api-keys-file", "--tls-cert-file", "--tls-key-file"} & set(plain)
    given = command(options("--demo", "--api-keys-file", "keys"), tmp_path, "gateway-1")
    assert given[given.index("--api-keys-file") + 1] == "keys"


def test_every_option_of_a_service_is_one_of_up_and_reaches_the_services_that_have_it(tmp_path: Path) -> None:
    for kind, option in EVERY:
        assert (option.name in declared()) == (not option.per_process), f"{kind} {option.flag}"
    given = options(
        "--demo", "--max-running", "7", "--max-lora-rank", "16", "--tool-call-parser", "hermes", "--no-prefix-cache"
    )
    worker, gateway, registry = (command(given, tmp_path, name) for name in ("worker-1", "gateway-1", "registry"))
    assert worker[worker.index("--max-running") + 1] == "7" and "--no-prefix-cache" in worker
    assert gateway[gateway.index("--tool-call-parser") + 1] == "hermes" and "--max-running" not in gateway
    for words in (worker, registry):
        assert words[words.index("--max-lora-rank") + 1] == "16"


def test_help_shows_the_common_options_and_help_all_every_one() -> None:
    short, everything = (CliRunner().invoke(up, [word]).output for word in ("--help", "--help-all"))
    for option in declared().values():
        assert f"  {option.flag} " in everything
        assert (f"  {option.flag} " in short) == option.common
    assert 20 < sum(option.common for option in declared().values()) < 45


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_gives_options_and_flags_and_variables_go_before_it(tmp_path: Path) -> None:
    file = write(
        tmp_path / "motet.yaml",
        "demo: true\nport: 9001\nmax-running: 5\nmerge: on\nprefix_cache: no\ntenants: [a, b]\ndrain_s: 3\n",
    )
    given = options("--config", file, "--drain-s", "4", MOTET_PORT="9002")
    assert (given.port, given.drain_s, given.tenants, given.served_model_name) == (9002, 4.0, ("a", "b"), BASE)
    worker = command(given, tmp_path, "worker-1")
    assert worker[worker.index("--max-running") + 1] == "5"
    assert worker[worker.index("--merge") + 1] == "on", "YAML 1.1 takes the word for true"
    assert "--no-prefix-cache" in worker


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("demo: true\nmax_runing: 5\n", 2, "max_runing is not an option; did you mean max_running"),
        ("demo: true\n\nport: many\n", 3, "--port"),
        ("port: 70000\n", 1, "--port"),
        ("workers: 0\n", 1, "--workers"),
        ("engine: fast\n", 1, "--engine"),
        ("demo: perhaps\n", 1, "--demo"),
        ("demo: true\nport: 1\nport: 2\n", 3, "given twice"),
        ("worker:\n  port: 1\n", 1, "worker is not an option"),
        ("port: {a: 1}\n", 1, "single value"),
        ("port: [1, 2]\n", 1, "single value"),
        ("listen_fd: 3\n", 1, "listen_fd is not an option"),
        ("- demo\n", 1, "option: value"),
        ("demo: true\nmodel: [\n", 3, "expected"),
        ("model: !!python/object:os.system x\nnothing: 1\n", 2, "nothing is not an option"),
    ],
)
def test_an_error_in_the_file_names_its_line(text: str, line: int, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "motet.yaml", text)
    with pytest.raises(ConfigError) as caught:
        options("--config", file)
    assert str(caught.value).startswith(f"{file}:{line}: ") and said in str(caught.value)


@pytest.mark.parametrize("where", ["in the file", "by flag", "by variable"])
def test_a_file_may_name_what_plugins_add_wherever_they_are_named(where: str, tmp_path: Path) -> None:
    plugin, file = tmp_path / f"adds_a_policy_{where.split()[-1]}.py", tmp_path / "motet.yaml"
    policy = plugin.stem.replace("_", "-")
    plugin.write_text(f"from motet.policies.cluster.dispatch import POLICIES\nPOLICIES.add({policy!r}, POLICIES['motet'])\n")
    line = f"plugins: {plugin}\n" if where == "in the file" else ""
    file.write_text(f"demo: true\npolicy: {policy}\n{line}")
    flags = {"plugins": str(plugin)} if where == "by flag" else {}
    environ = {"MOTET_PLUGINS": str(plugin)} if where == "by variable" else {}
    assert stack_options({"config": file, **flags}, environ).given["policy"] == policy


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        options("--config", str(tmp_path / "nowhere.yaml"))


DECIDED = {"listen_fd", "ops_port", "port", "adapter_cache_dir"}
"""What `motet up` decides for each process, as docs/configuration.md says; `port` is that of a gateway's own listener."""
CHANGED = {"gateway": {"drain_s"}, "registry": {"adapter_roots"}}
"""Streams of a gateway that is replaced run on; the directory of adapters is also one of the roots."""


@pytest.mark.parametrize("kind", SERVICES)
def test_the_variable_of_every_option_works_for_the_services_of_motet_up(kind: str, tmp_path: Path) -> None:
    every = fields(config_of(kind))
    (tmp_path / "one.jinja").touch()
    paths = {"model": str(DEMO / "model"), "adapters_dir": str(tmp_path), "adapter_roots": str(tmp_path)}
    paths |= {"chat_template": str(tmp_path / "one.jinja")}
    environ = {option.variable: paths.get(option.name) or values(option)[1] for option in every}
    given = options(**{"MOTET_MODEL": paths["model"], "MOTET_NATS_URL": "nats://bus:4222"} | environ)
    _, _, _, _, *words = command(given, tmp_path, kind if kind in ("registry", "predictor") else f"{kind}-1")
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    config = load(config_of(kind), flags, environ)
    without_effect = {option.name for option in every if value_of(config, option) != option.read(environ[option.variable])}
    assert without_effect <= (DECIDED | CHANGED.get(kind, set())) & flags.keys()


def test_a_model_without_a_chat_template_is_noted_and_a_template_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    model = Path(shutil.copytree(DEMO / "model", tmp_path / "model"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    words = ("--model", str(model))
    assert "give a file or one that Motet ships (chatml, llama3) with --chat-template" in options(*words).chats_missing
    assert not options(*words, "--chat-template", "chatml").chats_missing
    with pytest.raises(ConfigError, match="--chat-template: chatlm: neither one of"):
        options(*words, MOTET_CHAT_TEMPLATE="chatlm")


def test_a_services_help_leaves_out_what_is_for_experiments_and_help_all_shows_it() -> None:
    short, everything = (CliRunner().invoke(service_command("scheduler"), [word]).output for word in ("--help", "--help-all"))
    assert "--admission" in short and "--stale-s" not in short
    assert "--stale-s" in everything.partition("For experiments")[2] and "--admission" in everything


@pytest.mark.parametrize(
    ("words", "bounds", "begins", "told"),
    [
        (("--workers", "3"), (3, 3), 3, None),
        (("--workers", "1..4", "--scale", "act"), (1, 4), 1, ("1", "4")),
        (("--workers", "0..2", "--scale", "act"), (0, 2), 1, ("0", "2")),
        (("--workers", "2..4", "--scale", "act", "--scale-max", "3"), (2, 4), 2, ("2", "3")),
    ],
)
def test_a_range_of_workers_bounds_what_schedulers_decide(
    tmp_path: Path, words: tuple[str, ...], bounds: tuple[int, int], begins: int, told: tuple[str, str] | None
) -> None:
    given = options("--demo", *words)
    assert (given.workers_least, given.workers_most, given.workers) == (*bounds, begins)
    line = command(given, tmp_path, "scheduler-1")
    found = tuple(line[line.index(flag) + 1] for flag in ("--scale-min", "--scale-max")) if "--scale-min" in line else None
    assert found == told


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--workers", "1..4"), "a range needs --scale act"),
        (("--workers", "4..2", "--scale", "act"), "a range begins with the smaller number"),
        (("--workers", "1..65", "--scale", "act"), "at most 64"),
        (("--workers", "0"), "workers"),
        (("--workers", "two"), "workers"),
    ],
)
def test_a_range_that_nobody_can_follow_is_refused(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises((ConfigError, click.BadParameter), match=reason):
        options("--demo", *words)
