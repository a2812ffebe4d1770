"""Tiny checkpoints of every family, made once, with adapters of several ranks and kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support_image_models import MadeAdapter, Oracle, make_adapter, make_image_checkpoint, shapes_of

Oracles = Callable[[str], Oracle]
KINDS = {"small": ((4,), "attention"), "mixed": ((8, 16, 5), "linear"), "convs": ((8,), "all"), "words": ((16,), "text")}


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """The oracle of a family, with its adapters."""
    made: dict[str, Oracle] = {}

    def of(family: str) -> Oracle:
        if family not in made:
            model_dir = make_image_checkpoint(family, Path(tmp_path_factory.mktemp("image-models")))
            made[family] = Oracle(model_dir, adapters_of(model_dir))
        return made[family]

    return of


def adapters_of(model_dir: Path) -> list[MadeAdapter]:
    shapes = shapes_of(model_dir)
    return [make_adapter(shapes, name, ranks, kind, seed) for seed, (name, (ranks, kind)) in enumerate(KINDS.items())]
