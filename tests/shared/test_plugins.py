"""Promise: a plug-in adds to the tables before an option is read that names what it adds, and a broken one is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from motet.shared.config import ConfigError, ServiceConfig, load
from motet.shared.plugins import PluginError, import_plugins
from motet.shared.tables import Table, UnknownName


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "plugin_of_a_test.py"
    path.write_text("count = 1\n")
    yield path
    sys.modules.pop(path.stem, None)


def test_a_file_is_imported_once_under_its_own_name(plugin: Path) -> None:
    import_plugins(f"{plugin}, {plugin}")
    module = sys.modules["plugin_of_a_test"]
    module.count += 1
    import_plugins(str(plugin))
    assert sys.modules["plugin_of_a_test"] is module and module.count == 2


def test_a_module_of_the_current_directory_can_be_named(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plugin.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    import_plugins("plugin_of_a_test")
    assert sys.modules["plugin_of_a_test"].count == 1


def test_two_files_of_one_name_are_refused(plugin: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / plugin.name
    other.parent.mkdir()
    other.write_text("count = 2\n")
    import_plugins(str(plugin))
    with pytest.raises(PluginError, match="there is a module plugin_of_a_test already"):
        import_plugins(str(other))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("(", "SyntaxError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named_with_the_reason_and_not_half_there(
    plugin: Path, content: str, reason: str
) -> None:
    plugin.write_text(content)
    with pytest.raises(ConfigError, match=f"--plugins: .*plugin_of_a_test.py: .*{reason}"):
        load(ServiceConfig, {"plugins": str(plugin)}, {})
    assert plugin.stem not in sys.modules


def test_the_variable_names_plugins_too(plugin: Path) -> None:
    assert load(ServiceConfig, {}, {"MOTET_PLUGINS": str(plugin)}).process.plugins == str(plugin)
    assert plugin.stem in sys.modules


def test_a_table_takes_a_name_once_and_says_which_it_has() -> None:
    table: Table[int] = Table({"one": 1})
    table.add("two", 2)
    table.add("two", 2)
    with pytest.raises(ValueError, match="'two' is the name of another one"):
        table.add("two", 3)
    assert (table.named("one"), table.named("two")) == (1, 2)
    with pytest.raises(UnknownName, match=r"'three' is not one of one, two \(modules given as --plugins may add others\)"):
        table.named("three")
