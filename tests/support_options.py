"""Every option of every service, and values to try it with."""

from __future__ import annotations

from typing import Any

import msgspec

import bench.rivals  # noqa: F401 (policies have another value to try)
from motet.cli.options import config_of
from motet.shared.config import Config, Field, fields

SERVICES = ("gateway", "predictor", "scheduler", "registry", "worker")
EVERY = [(kind, option) for kind in SERVICES for option in fields(config_of(kind))]
IDS = [f"{kind}{option.flag}" for kind, option in EVERY]
REQUIRED = {"model": "m"}


def values(option: Field) -> tuple[str, str]:
    """Two different values in the form of the command line. Neither is the default."""
    bounds = [meta for meta in getattr(option.hint, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
    if option.choices:
        others = [choice for choice in option.choices if choice != option.default]
        return others[0], others[-1] if len(others) > 1 else str(option.default)
    if option.type is bool:
        return ("false", "true") if option.default else ("true", "false")
    if option.type in (int, float):
        least = max((meta.ge or meta.gt or 0 for meta in bounds), default=0)
        two = [n for n in (least + 1, least + 2, least + 3) if n != option.default]
        return str(two[0]), str(two[1])
    words = {"device": ("cpu", "cuda"), "assist_cores": ("0", "0,1"), "plugins": ("colorsys", "graphlib")}
    words["assist_processes"] = ("auto", "2")
    return words.get(option.name, ("one", "two"))


def value_of(config: Config, option: Field) -> Any:
    found: Any = config
    for group, _ in option.groups:
        found = getattr(found, group)
    return getattr(found, option.name)
