"""Promise: a registry of an image model refuses every hostile file by name, within bounded memory, and leaves no trace."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from motet.shared import subjects
from motet.shared.adapter_blob import MAX_HEADER_BYTES
from motet.shared.errors import MotetError
from tests.services.registry.conftest import Client, StartRegistry
from tests.services.registry.test_malformed import verdict
from tests.support_adapters import safetensors_bytes
from tests.support_images import (
    TINY,
    as_kohya,
    as_peft,
    kohya_name,
    random_pairs,
    shapes,
    with_metadata,
    write_checkpoint,
)
from tests.support_malformed import raw_safetensors, zip_of

BASE = shapes("sd15")
LIMIT_BYTES = 128 << 20
MEMORY_BYTES = 64 << 20
"""What one refusal may add to the memory of a registry: a header of 4 MiB takes some 7 times its size while it is read."""
Q = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
CONV = "unet.down_blocks.1.resnets.0.conv1"
SITE = {one.path: one for one in BASE.sites}
PEFT = as_peft(random_pairs([SITE[Q]]))
KOHYA = as_kohya(random_pairs([SITE[Q], SITE[CONV]]), {Q: 4.0, CONV: 4.0})
QA, QB, KQ = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", kohya_name(Q)


def weights() -> Iterator[tuple[str, bytes, str]]:
    """(name, file, a part of the refusal)"""
    for name, value in (("nan", np.nan), ("infinite", np.inf)):
        for dtype in ("F32", "F16", "BF16"):
            poisoned = PEFT[QB].copy()
            poisoned[-1, -1] = value
            yield f"{name}-{dtype}", safetensors_bytes(PEFT | {QB: poisoned}, dtype), f"{QB}: NaN or infinity at [63, 3]"
    for name, value in (("zero", 0), ("nan", np.nan), ("infinite", np.inf)):
        yield f"alpha-{name}", safetensors_bytes(KOHYA | {f"{KQ}.alpha": np.float32(value)}), f"{KQ}.alpha: alpha is"
    for sign, alpha in (("positive", 1e300), ("negative", -1e300)):
        told = {"lora_adapter_metadata": json.dumps({"unet.r": 4, "unet.lora_alpha": alpha})}
        yield f"alpha-absurd-{sign}", with_metadata(safetensors_bytes(PEFT), told), "which has no finite effect"
    other = {key: tensor[:2] if key.endswith("A.weight") else tensor for key, tensor in PEFT.items()}
    yield "ranks-differ", safetensors_bytes(other), f"{QB}: rank 4, but {QA} has rank 2"
    told = {"lora_adapter_metadata": json.dumps({"unet.r": 8, "unet.lora_alpha": 8})}
    yield "rank-told-differs", with_metadata(safetensors_bytes(PEFT), told), "rank 4, but lora_adapter_metadata says 8"
    yield "rank-over-the-limit", safetensors_bytes(as_peft(random_pairs([SITE[Q]], (257,)))), "rank 257 is over the limit"
    yield "rank-zero", safetensors_bytes({QA: np.ones((0, 64)), QB: np.ones((64, 0))}), f"{QA}: shape"
    yield "half", safetensors_bytes({QA: PEFT[QA]}), f"{QA}: lora_B (lora_up) of the same module is missing"
    yield "none", raw_safetensors(b"{}"), "holds no LoRA matrices"
    missing = {key.replace("down_blocks.1", "down_blocks.7"): tensor for key, tensor in PEFT.items()}
    yield "site-missing", safetensors_bytes(missing), "the base model has no linear layer or convolution of this name"
    missing = {key.replace("down_blocks_1", "down_blocks_7"): tensor for key, tensor in KOHYA.items()}
    yield "site-missing-kohya", safetensors_bytes(missing), "the base model has no linear layer or convolution of this name"
    yield "site-larger", safetensors_bytes({QA: np.ones((4, 640)), QB: np.ones((640, 4))}), "has 64 inputs, 64 outputs"


def families() -> Iterator[tuple[str, bytes, str]]:
    two = (np.ones((4, 8), np.float32), np.ones((8, 4), np.float32))
    keys = {
        "flux": ("transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight", "an adapter for FLUX"),
        "flux-kohya": ("lora_unet_double_blocks_0_img_attn_proj.lora_down.weight", "an adapter for FLUX"),
        "sd3": ("lora_unet_joint_blocks_0_context_block_attn_proj.lora_down.weight", "an adapter for Stable Diffusion 3"),
        "qwen": ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "FLUX, Stable Diffusion 3 or Qwen-Image"),
        "wan": ("diffusion_model.blocks.0.self_attn.q.lora_down.weight", "an adapter for Wan"),
        "loha": (f"{KQ}.hada_w1_a", "LoHa is not served"),
        "lokr": (f"{KQ}.lokr_w1", "LoKr is not served"),
        "dora": (f"{KQ}.dora_scale", "DoRA rescales the base weights"),
        "textual-inversion": ("emb_params", "textual inversion is not served"),
        "llama": ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "an adapter of a language model"),
    }
    for name, (key, reason) in keys.items():
        yield f"family-{name}", safetensors_bytes({key: two[0]}), reason
    for told, reason in (
        ({"ss_base_model_version": "sdxl_base_v1-0"}, "an adapter for sdxl, but the base model is sd15"),
        ({"modelspec.architecture": "flux-1-dev/lora"}, "an adapter for FLUX"),
        ({"ss_base_model_version": "sd3m"}, "an adapter for Stable Diffusion 3"),
    ):
        yield f"family-told-{len(reason)}", with_metadata(safetensors_bytes(PEFT), told), reason
    xl = shapes("sdxl")
    deep = [one for one in xl.sites if "mid_block" in one.name and "transformer_blocks.1" in one.name]
    yield "family-sdxl-sites", safetensors_bytes(as_peft(random_pairs(deep))), "the base model has no linear layer"
    original = {"lora_unet_input_blocks_4_1_transformer_blocks_1_attn1_to_q.lora_down.weight": two[0]}
    yield "family-sdxl-original", safetensors_bytes(original), "the base model has no linear layer"


def many(count: int) -> bytes:
    """A file of `count` tensors without data."""
    entries = ",".join(f'"unet.x{n}.lora_A.weight":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(count))
    return raw_safetensors(b"{" + entries.encode() + b"}")


def headers() -> Iterator[tuple[str, bytes, str]]:
    good = safetensors_bytes(PEFT)
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    yield "header-past-the-end", struct.pack("<Q", 1 << 40) + good[8:], "does not fit in"
    yield "header-cut", good[: length // 2], "does not fit in"
    yield "data-cut", good[:-1], "pass the end"
    yield "data-more", good + bytes(100), "100 bytes after the last tensor"
    lies = {
        "shape": ({"shape": [4, 65]}, "does not fill"),
        "astronomic": ({"shape": [1 << 39, 1 << 39]}, "does not fill"),
        "negative": ({"shape": [-4, -64]}, "bad header"),
        "dimensions": ({"shape": [1] * 9}, "bad header"),
        "dtype": ({"dtype": "F16"}, "does not fill"),
        "dtype-unknown": ({"dtype": "F8_E4M3"}, "one of F32, F16, BF16 is expected"),
        "offsets": ({"data_offsets": [0, 1 << 60]}, "pass the end"),
    }
    for name, (lie, reason) in lies.items():
        text = json.dumps(header | {QA: header[QA] | lie}).encode()
        yield f"header-lies-{name}", raw_safetensors(text, good[8 + length :]), reason
    yield "tensors-10-to-the-6", many(1_000_000), f"the limit is {MAX_HEADER_BYTES}"
    yield "tensors-as-many-as-fit", many(40_000), "unet.x0.lora_A.weight: the base model has no"
    yield "metadata-of-megabytes", with_metadata(good, {"ss_tag_frequency": "x" * MAX_HEADER_BYTES}), "the limit is"
    yield "metadata-deep", with_metadata(good, {"lora_adapter_metadata": "[" * 100_000}), "is not a JSON object"


def hostile() -> list[tuple[str, bytes, str]]:
    return [*weights(), *families(), *headers()]


@pytest.fixture
async def artist(start_registry: StartRegistry, connect, roots: Path, tmp_path: Path) -> Client:
    base = write_checkpoint(tmp_path / "tiny-sd15", *TINY["sd15"])
    await start_registry(model=str(base), max_adapter_bytes=LIMIT_BYTES)
    return Client(await connect("gateway"), roots)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The largest resident memory of this process while the context lasts, above what it was."""

    def __enter__(self) -> Peak:
        self.before_bytes = self.most_bytes = resident_bytes()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._sample)
        self._watch.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.most_bytes = max(self.most_bytes, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()

    @property
    def bytes(self) -> int:
        return self.most_bytes - self.before_bytes


async def test_every_hostile_file_is_refused_by_name_within_bounded_memory(artist: Client, roots: Path):
    cases = hostile()
    assert len({name for name, _, _ in cases}) == len(cases) >= 50
    uploads = await artist.bus.object_store(subjects.UPLOADS)
    wrong = []
    for number, (name, data, reason) in enumerate(cases):
        location, kind = f"{name}.safetensors", "path"
        if number % 4 == 1:
            (roots / name).mkdir()
            location, path = name, roots / name / "style.safetensors"
        elif number % 4 == 2 and len(data) < 1 << 20:
            location, kind, path = name, "upload", None
            await uploads.put(name, data)
        else:
            path = roots / location
        if path is not None:
            await asyncio.to_thread(path.write_bytes, data)
        error: MotetError | None = None
        with Peak() as peak:
            try:
                await artist.register(f"bad/{name}", location, kind=kind)
            except MotetError as caught:
                error = caught
        wrong.append(verdict(name, reason, error))
        if peak.bytes > MEMORY_BYTES:
            wrong.append(f"{name}: {peak.bytes >> 20} MiB")
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert await artist.keys() == set() and await artist.blobs() == set() and await artist.names() == []
    good = roots / "good.safetensors"
    good.write_bytes(safetensors_bytes(PEFT))
    assert (await artist.register("good", good)).version.sites == 1


async def test_a_small_file_that_needs_whole_pages_beyond_the_limit_is_refused(
    start_registry: StartRegistry, connect, roots: Path, tmp_path: Path
):
    base = write_checkpoint(tmp_path / "tiny-sd15", *TINY["sd15"])
    (roots / "one.zip").write_bytes(zip_of({"one.safetensors": safetensors_bytes(as_peft(random_pairs(BASE.sites, (1,))))}))
    size = (roots / "one.zip").stat().st_size
    await start_registry(model=str(base), max_adapter_bytes=2 * size)
    client = Client(await connect("gateway"), roots)
    error = await client.refused("one", "one.zip")
    assert error.status == 413 and "in whole pages of 8 ranks over all sites of a class" in error.message
