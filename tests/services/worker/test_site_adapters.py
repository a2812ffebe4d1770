"""A `motet-lora/3` blob in host memory: mapped as it is or cast, checked against the base's classes, loaded into a pool."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from motet.kernels import LoraBatch, LoraPool, add_lora
from motet.services.worker.engines.adapter_weights import HostAdapter, class_shapes
from motet.shared.adapter_blob import Matrices, write_blob, write_site_blob
from motet.shared.errors import InvalidAdapter
from motet.shared.image_shapes import image_shapes_of
from tests.support_images import SD15

SHAPES = {"b.conv 27x16": (27, 16, 1), "a.to_q 24x40": (24, 40, 4), "c.ff 8x8": (8, 8, 2)}


def matrices(seed: int, fan_in: int, fan_out: int, rank: int) -> Matrices:
    draw = np.random.default_rng(seed)
    a, b = draw.standard_normal((rank, fan_in)), draw.standard_normal((fan_out, rank))
    return 0.5, a.astype(np.float32), b.astype(np.float32)


ADAPTER = {
    "b.conv 27x16": ({0: matrices(1, 27, 16, 4)}, 1),
    "a.to_q 24x40": ({1: matrices(2, 24, 40, 9), 3: matrices(3, 24, 40, 2)}, 4),  # block-wise ranks, sites without any
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_blob_is_loaded_into_a_pool_of_its_classes(tmp_path: Path, dtype: torch.dtype | None) -> None:
    blob = write_site_blob(ADAPTER, dtype="F32")
    path = tmp_path / "blob"
    path.write_bytes(blob)
    adapter = HostAdapter.from_blob(path, SHAPES, dtype=dtype)
    assert (adapter.digest, adapter.rank) == (hashlib.sha256(blob).hexdigest(), 9)
    assert adapter.ranks == {"a.to_q 24x40": 9, "b.conv 27x16": 4}
    assert adapter.anonymous == (dtype is not None)  # a file of the engine's type is mapped
    pool = LoraPool(SHAPES, slots=2, max_rank=16, bytes_total=1 << 20, dtype=dtype or torch.float32)
    free = pool.bytes_free
    pool.load(1, adapter.packed)
    assert free - pool.bytes_free == pool.bytes_needed(adapter.ranks)
    batch = LoraBatch.build(pool, np.array([1, -1, 1], dtype=np.int32))
    for name, (fan_in, fan_out, sites) in SHAPES.items():
        for site in range(sites):
            x, y = torch.ones(3, fan_in), torch.zeros(3, fan_out)
            add_lora(y, x, pool, site, name, batch)
            pair = ADAPTER[name][0].get(site) if name in ADAPTER else None
            want = torch.zeros(3, fan_out)
            if pair is not None:
                scale, a, b = pair
                want[[0, 2]] = torch.from_numpy(scale * b @ (a @ np.ones(fan_in, np.float32)))
            torch.testing.assert_close(y, want, rtol=1e-5 if dtype is None else 0.05, atol=1e-5 if dtype is None else 0.3)


def test_a_blob_for_other_sites_is_refused_by_name() -> None:
    blob = write_site_blob(ADAPTER, dtype="F32")
    for shapes, reason in (
        ({"b.conv 27x16": SHAPES["b.conv 27x16"]}, "a.to_q 24x40: the base model has no such sites"),
        (SHAPES | {"a.to_q 24x40": (24, 40, 5)}, "24 -> 40 at 4 sites does not fit the base's 24 -> 40 at 5"),
        (SHAPES | {"b.conv 27x16": (27, 8, 1)}, "27 -> 16 at 1 sites does not fit the base's 27 -> 8 at 1"),
    ):
        with pytest.raises(InvalidAdapter, match=reason):
            HostAdapter.from_blob(blob, shapes)


def test_a_text_models_blob_is_refused_by_its_format() -> None:
    blob = write_blob({(0, "q_proj"): matrices(1, 24, 40, 4)}, dtype="F32", layers=1)
    with pytest.raises(InvalidAdapter, match="motet-lora/2"):
        HostAdapter.from_blob(blob, SHAPES)


def test_the_classes_of_a_checkpoint_have_as_many_sites_as_it_has() -> None:
    shapes = image_shapes_of(*SD15)
    classes = class_shapes(shapes)
    assert sum(sites for _, _, sites in classes.values()) == len(shapes.sites)
    assert classes["unet.attn1.to_q 320x320"] == (320, 320, 5)
    assert classes["unet.conv_in 36x320"] == (36, 320, 1)
