"""Where a model comes from: a directory, the hub, or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.shared.config import ConfigError
from motet.shared.hub import resolve_model


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_what_cannot_be_a_hub_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a directory nor"):
        resolve_model("no/such/directory")


def test_a_hub_id_that_is_not_cached_says_so_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="not cached"):
        resolve_model("motet-test/no-such-model")
