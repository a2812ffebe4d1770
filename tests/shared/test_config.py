"""Promise: an option is declared once and is the same thing as a flag, as a variable and in the code."""

from __future__ import annotations

import ast
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet.cli.options import config_of
from motet.cli.up_options import StackConfig
from motet.services.registry.config import RegistryConfig
from motet.services.registry.hub import HubOptions
from motet.shared.config import ConfigError, Field, ServiceConfig, fields, load
from tests.support_options import EVERY, IDS, REQUIRED, value_of, values

ROOT = Path(__file__).resolve().parents[2]
every_option = pytest.mark.parametrize(("kind", "option"), EVERY, ids=IDS)


@every_option
def test_a_flag_goes_before_the_variable_and_the_variable_before_the_default(kind: str, option: Field) -> None:
    cls, (by_flag, by_variable) = config_of(kind), values(option)
    given = {name: value for name, value in REQUIRED.items() if name in {one.name for one in fields(cls)}}

    def loaded(flags: dict[str, str], environ: dict[str, str]) -> Any:
        return value_of(load(cls, flags, environ), option)

    others = {name: value for name, value in given.items() if name != option.name}
    assert loaded(others | {option.name: by_flag}, {option.variable: by_variable}) == option.read(by_flag)
    assert loaded(others, {option.variable: by_variable}) == option.read(by_variable)
    if option.default is not msgspec.NODEFAULT:
        assert loaded(others, {}) == option.default
        assert option.read(by_flag) != option.default


@every_option
def test_every_option_is_described_and_documented(kind: str, option: Field) -> None:
    assert option.description, f"{option.flag} of motet {kind} says nothing"
    assert f"| `{option.flag}` | `{option.variable}` |" in (ROOT / "docs" / "configuration.md").read_text()


def test_a_variable_means_the_same_to_every_service() -> None:
    definitions = defaultdict(set)
    for option in [*(option for _, option in EVERY), *fields(StackConfig)]:
        definitions[option.variable].add((repr(option.hint), str(option.default)))
    for variable, found in definitions.items():
        assert len(found) == 1, f"{variable} is {len(found)} different options"


def test_every_option_is_read_by_the_code_that_it_is_for() -> None:
    read = defaultdict(set)
    for folder in ("services", "shared", "motet/cli"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    read[node.attr].add(path)
    derived = {option.name for option in fields(config_of("gateway")) if option.name.startswith("slo_")}  # by getattr
    unread = {option.name for _, option in EVERY} - read.keys() - derived - {"plugins"}  # `load` imports them
    assert not unread, f"options that no code reads: {sorted(unread)}"


def test_a_configuration_made_in_code_reads_no_variables_and_knows_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_OPS_PORT", "9100")
    assert ServiceConfig.of().process.ops_port == 0
    assert load(ServiceConfig, {}).process.ops_port == 9100
    with pytest.raises(ConfigError, match="no option max_stuff"):
        ServiceConfig.of(max_stuff=1)


@pytest.mark.parametrize("kind", ["gateway", "registry", "worker"])
def test_a_required_option_is_asked_for_by_flag_and_variable(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"--model .*MOTET_MODEL"):
        load(config_of(kind), {}, {})


def test_a_value_that_does_not_fit_names_its_flag_whatever_group_it_is_in() -> None:
    for kind, name, value in (("gateway", "port", 70_000), ("worker", "dtype", "int3"), ("scheduler", "attempts", "many")):
        with pytest.raises(ConfigError, match=f"--{name}"):
            load(config_of(kind), {name: value, **({} if kind == "scheduler" else REQUIRED)}, {})


def test_the_objectives_of_the_classes_are_those_of_the_options() -> None:
    slo = config_of("gateway").of(model="m", slo_batch_ttft_ms=9.0, slo_batch_tpot_ms=8.0).slo  # type: ignore[attr-defined]
    assert (slo.classes["batch"].ttft_slo_ms, slo.classes["batch"].tpot_slo_ms) == (9.0, 8.0)
    assert slo.classes["standard"].slo_class == "standard"


def test_downloads_are_limited_as_the_options_say() -> None:
    options = {"hub_endpoint": "https://h", "hub_repositories": "a/*, b/c", "hub_private_hosts": "x:1", "hub_timeout_s": 2.0}
    config = RegistryConfig.of(model="m", max_adapter_bytes=2048, **options)
    assert config.hub == HubOptions(
        endpoint="https://h", repositories=("a/*", "b/c"), private_hosts=("x:1",), timeout_s=2.0, max_bytes=2048
    )


def test_an_id_can_name_the_kind_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node.example.org")
    process = ServiceConfig.of(instance_id="{kind}-{hostname}").process
    assert process.identity("worker") == "worker-node-example-org"


def test_an_id_without_places_stays_as_it_is_and_none_is_drawn() -> None:
    assert ServiceConfig.of(instance_id="w1").process.identity("worker") == "w1"
    first, second = (ServiceConfig().process.identity("worker") for _ in range(2))
    assert first.startswith("worker-") and first != second


@pytest.mark.parametrize("bad", ["a.b", "{user}", "{kind", "a b", "{0}", "{kind.__class__}"])
def test_an_id_that_does_not_fit_into_a_subject_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="--instance-id"):
        load(ServiceConfig, {"instance_id": bad})
