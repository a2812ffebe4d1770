"""Promise: a service's id on the bus can be made from where it runs, and always fits into a subject."""

from __future__ import annotations

import socket

import pytest

from motet.shared.config import ConfigError, ServiceConfig, load


def test_an_id_can_name_the_kind_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node.example.org")
    config = load(ServiceConfig, {"instance_id": "{kind}-{hostname}"})
    assert config.identity("worker") == "worker-node-example-org"


def test_an_id_without_places_stays_as_it_is_and_none_is_drawn() -> None:
    assert ServiceConfig(instance_id="w1").identity("worker") == "w1"
    first, second = (ServiceConfig().identity("worker") for _ in range(2))
    assert first.startswith("worker-") and first != second


@pytest.mark.parametrize("bad", ["a.b", "{user}", "{kind", "a b", "{0}", "{kind.__class__}"])
def test_an_id_that_does_not_fit_into_a_subject_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="--instance-id"):
        load(ServiceConfig, {"instance_id": bad})
