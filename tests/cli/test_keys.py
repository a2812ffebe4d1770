"""`motet keys`: a printed key can be used, and only its owner can read a key file."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from motet.cli.client import Client
from motet.cli.keys import DURATION
from motet.cli.main import cli
from motet.shared.keys import read_key_file


def test_a_key_for_a_file_is_what_the_gateway_reads(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    first = CliRunner().invoke(cli, ["keys", "create", "--role", "admin", "--file", str(path)])
    second = CliRunner().invoke(cli, ["keys", "create", "--tenant", "acme", "--file", str(path)])
    assert first.exit_code == second.exit_code == 0, first.output + second.output
    assert [(key.tenant, key.role) for key in read_key_file(str(path))] == [("default", "admin"), ("acme", "use")]
    assert path.read_text().startswith(first.output.strip() + " ")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("words", [["--tenant", "a.b"], ["--role", "root"], ["--name", "x"]])
def test_a_key_that_a_file_cannot_hold_is_refused(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "keys.txt"
    assert CliRunner().invoke(cli, ["keys", "create", "--file", str(path), *words]).exit_code == 2
    assert not path.exists()


def test_durations_have_units() -> None:
    assert [DURATION.convert(text, None, None) for text in ("90d", "12h", "0", "1.5m", "2w")] == [
        7_776_000,
        43_200,
        0,
        90,
        1_209_600,
    ]


def test_the_commands_send_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_API_KEY", "mtt_mine")
    assert Client("http://x").headers == {"authorization": "Bearer mtt_mine"}
    assert Client("http://x", api_key="").headers == {}
