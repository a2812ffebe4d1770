"""The plug-in for vLLM, where vLLM is not: it is declared, it never raises, and the switch turns it off.

tests/engines/test_vllm_lora.py has what it does inside vLLM.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys

import pytest

from motet.kernels import vllm


def test_vllm_finds_it_by_its_entry_point() -> None:
    [found] = [one for one in importlib.metadata.entry_points(group="vllm.general_plugins") if one.name == "motet"]
    assert found.load() is vllm.register


def test_what_goes_wrong_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(vllm.SWITCH, raising=False)
    monkeypatch.setitem(sys.modules, "motet.kernels.vllm.prepare", None)
    with caplog.at_level(logging.WARNING, logger="vllm.motet"):
        vllm.register()
    assert "are not used" in caplog.text and "ModuleNotFoundError" in caplog.text


@pytest.mark.parametrize("value", ["0", "off", " False "])
def test_the_switch_turns_it_off(value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(vllm.SWITCH, value)
    monkeypatch.setitem(sys.modules, "motet.kernels.vllm.prepare", None)
    vllm.register()
    assert not caplog.records
