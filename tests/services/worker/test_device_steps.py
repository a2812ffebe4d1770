"""GPU code that can be tested without one: the device's number, graphs without LoRA, stalled copies, random weights."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import motet.kernels.device.streams as streams
import motet.kernels.lora
import motet.kernels.triton
import motet.services.worker.native.torch_steps as torch_steps
from bench.gpu_stages.shapes import write_config
from motet.kernels.device import cuda_streams, numbered
from motet.kernels.triton import pointwise
from motet.kernels.triton.attention import PagedAttention
from motet.kernels.triton.lora import INTERPRETED
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.engines.model_config import read_model_config
from motet.services.worker.native.backend import BackendOptions
from motet.services.worker.native.backends.reference import reference
from motet.services.worker.native.checkpoint import parameters
from motet.services.worker.native.decode_graphs import DecodeBuffers
from tests.kernels.support_driver import LATE, Driver
from tests.services.worker.test_decode_graphs import STEPS, buffers_of, decode_step, give_history, logits_of
from tests.support_models import Sequence, make_adapters, make_checkpoint, make_runner, step_batch


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(streams, "try_waiting", lambda operations, stream: None)
    made: Any = cuda_streams(torch.device("cuda"), None)  # type: ignore[arg-type]
    assert chosen == [torch.device("cuda", 3)] and made.device == torch.device("cuda", 3), "set_device refuses plain cuda"
    assert numbered(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert numbered(torch.device("cpu")) == torch.device("cpu")


def test_steps_of_the_base_alone_have_graphs_without_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_checkpoint("llama3", tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:2]
    runner, twin = (make_runner(model_dir, adapters, kernels="reference") for _ in range(2))
    give_history(runner, twin)
    step = decode_step([6, 91, 3], [-1, -1, -1], seed=1)
    want = twin.forward(step)
    with torch.inference_mode():
        scratch = runner.memory.cache.null_block - 1
        buffers = DecodeBuffers((4, 16), runner.steps.model, runner.memory.cache, runner.pool, scratch, adapted=False)
        buffers.fill(step)
        torch.testing.assert_close(logits_of(buffers)[:3], want, rtol=1e-4, atol=1e-4)
        runner.free_adapter(0)
        buffers.fill(step)
        torch.testing.assert_close(logits_of(buffers)[:3], want, rtol=1e-4, atol=1e-4)
        with pytest.raises(AssertionError, match="without LoRA"):
            buffers.fill(STEPS[1])


@pytest.mark.skipif(not INTERPRETED, reason="tensors here are the CPU's")
@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
def test_a_graph_of_triton_kernels_alone_says_what_torch_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_checkpoint(family, tmp_path)
    adapters = make_adapters(model_dir, tmp_path)[:3]
    runner, twin = (make_runner(model_dir, adapters, kernels="reference") for _ in range(2))
    give_history(runner, twin)
    want = [twin.forward(step) for step in STEPS[:2]]
    monkeypatch.setattr(motet.kernels.lora, "kernels_of", lambda pool: motet.kernels.triton)
    monkeypatch.setattr(runner.steps.model, "pointwise", pointwise)
    runner.memory.cache.library = PagedAttention(runner.memory.cache, heads=runner.config.num_heads)
    with torch.inference_mode():
        buffers = buffers_of(runner, (8, 16), scratch_block=runner.memory.cache.null_block - 1)
        for step, logits in zip(STEPS[:2], want, strict=True):
            buffers.fill(step)
            torch.testing.assert_close(logits_of(buffers)[: len(logits)], logits, rtol=1e-4, atol=1e-4)


def test_a_step_whose_copies_stand_still_makes_them_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This happens when the driver keeps the loader waiting until the device is idle, while the device waits for the loader's
    copy.
    """
    monkeypatch.setattr(torch_steps, "STANDSTILL_S", 0.05)
    model_dir = make_checkpoint("qwen2", tmp_path)
    adapters = make_adapters(model_dir, tmp_path)
    twin = make_runner(model_dir, adapters, kernels="reference")
    driver, slot = Driver.build(tmp_path), 3
    monkeypatch.setitem(reference.__globals__, "host_streams", lambda library: driver.streams(library, LATE))
    runner = make_runner(model_dir, [], kernels="reference", link_bytes_per_s=1e12)

    def device() -> None:
        while runner.loaded_layers(slot) < runner.config.num_layers:
            time.sleep(0.001)  # time: nothing happens while a stream waits
        with driver.running():
            over.wait()

    over, thread = threading.Event(), threading.Thread(target=device)
    thread.start()
    host = HostAdapter.from_blob(adapters[slot].blob, runner.config)
    runner.begin_load(slot, host)
    for at in (0, 9):  # and the next step is like any other
        sequence = Sequence(list(range(10, 30)), slot, 1, done=at, blocks=[4, 9, 2])
        batch = step_batch([sequence], [9], 8)
        batch.slot_modes = {slot: "layerwise"} if at == 0 else {}
        torch.testing.assert_close(runner.forward(batch), twin.forward(batch), rtol=1e-4, atol=1e-4)
    assert "copies of adapters stand still" in caplog.text
    runner.close()
    over.set()
    thread.join()


def test_weights_of_real_shapes_need_no_checkpoint(tmp_path: Path) -> None:
    home = write_config("tiny", tmp_path)
    config = read_model_config(home)
    options = {"kv_blocks": 16, "lora_bytes": 1 << 20, "max_lora_rank": 8, "max_loras": 1}
    runners = [reference(BackendOptions(model_dir=home, load_format="dummy", **options)) for _ in range(2)]
    batch = step_batch([Sequence(list(range(3, 9)), -1, 1, blocks=[0])], [6], 16)
    first, second = (runner.forward(batch) for runner in runners)
    assert first.isfinite().all() and torch.equal(first, second) and len(np.unique(first.argmax(-1).numpy())) > 1
    steps: Any = runners[0].steps
    weights = steps.model.weights
    sizes = [weights.embed.numel(), weights.norm.numel(), config.vocab_size * config.hidden_size]
    layer = sum(fan_in * out for fan_in, out in config.projection_shapes().values()) + 2 * config.hidden_size
    assert parameters(config) == sum(sizes) + config.num_layers * layer
