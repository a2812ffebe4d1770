"""Real CPU LoRA processes: whatever happens to them, a request on an adapter being copied gets its cached answer."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from motet.kernels import LoraPool
from motet.kernels.cpu import CpuEngine
from motet.services.worker.engines.adapter_weights import HostAdapter
from motet.services.worker.native.assist_processes import AssistProfile, CpuAssist
from motet.services.worker.native.step_batch import StepBatch
from tests.support import until
from tests.support_models import AdapterFixture, Sequence, drive, make_adapters, make_checkpoint, make_runner, random_prompts

LINK_BYTES_PER_S = 30e6  # some ten steps of this model for each of the larger adapters
PATIENT_S = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[AdapterFixture]]:
    directory = tmp_path_factory.mktemp("assist")
    model_dir = make_checkpoint("llama-linear-biased", directory)
    return model_dir, make_adapters(model_dir, directory)


class Cached:
    """The reference: every adapter is on the device."""

    def __init__(self, checkpoint: tuple[Path, list[AdapterFixture]]) -> None:
        self.runner = make_runner(*checkpoint, threads=1)

    def run(self, sequences: list[Sequence]) -> list[Sequence]:
        again = [Sequence(list(s.prompt), s.slot, s.count) for s in sequences]
        drive(self.runner, again, chunk=9)
        return again


@pytest.fixture(scope="module")
def cached(checkpoint: tuple[Path, list[AdapterFixture]]) -> Iterator[Cached]:
    one = Cached(checkpoint)
    yield one
    one.runner.close()


class Cold:
    """A runner with processes. `forward` is the runner's, with every unfinished adapter in the given mode."""

    def __init__(self, checkpoint: tuple[Path, list[AdapterFixture]], kernels: str, processes: int = 2) -> None:
        model_dir, adapters = checkpoint
        self.runner = make_runner(
            model_dir,
            [],
            threads=1,
            kernels=kernels,
            link_bytes_per_s=LINK_BYTES_PER_S,
            assist_cores=(-1,) * processes,
            assist_rows=64,
        )
        assert self.runner.assist is not None
        self.assist = self.runner.assist
        self.assist.watchdog_s = PATIENT_S
        self.hosts = [HostAdapter.from_blob(one.blob, self.runner.config, dtype=self.runner.dtype) for one in adapters]
        self.mode = "assist"
        self.before_step: Callable[[], None] = lambda: None

    def ready(self, processes: int = 2) -> None:
        wait(lambda: self.assist.capacity.processes == processes)

    def begin(self, *slots: int) -> None:
        for slot in slots:
            self.runner.free_adapter(slot)
            self.runner.begin_load(slot, self.hosts[slot])

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.before_step()
        batch.slot_modes = dict.fromkeys(range(len(self.hosts)), self.mode)
        return self.runner.forward(batch)


@pytest.fixture(params=["cpu", "reference"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Compiled steps, and torch's as a device runs them, whose streams are the engine's thread here."""
    return request.param


@pytest.fixture
def cold(checkpoint: tuple[Path, list[AdapterFixture]], kernels: str) -> Iterator[Cold]:
    one = Cold(checkpoint, kernels)
    one.ready()
    yield one
    one.runner.close()


def wait(done: Callable[[], object], timeout_s: float = 120.0) -> None:
    until(done, within_s=timeout_s, every_s=0.002)


def requests(*slots: int, count: int = 8, seed: int = 0) -> list[Sequence]:
    prompts = random_prompts(len(slots), seed=seed, shortest=5)
    return [Sequence(prompt, slot, count) for prompt, slot in zip(prompts, slots, strict=True)]


def assert_as_cached(got: list[Sequence], want: list[Sequence]) -> None:
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.output == other.output, f"request {number} on slot {one.slot}"
        apart = (torch.stack(one.logits) - torch.stack(other.logits)).abs().max().item()
        assert apart <= 1e-4, f"request {number} on slot {one.slot}: logits are {apart} apart"


def assisted_run(cold: Cold, cached: Cached, *, seed: int = 0) -> None:
    """Cached, base and cold rows through prefill and decode while the copies arrive."""
    sequences = requests(3, 0, -1, 2, 1, 5, 7, 4, 6, 3, seed=seed)
    want = cached.run(sequences)
    cold.runner.free_adapter(0)
    cold.runner.load_adapter(0, cold.hosts[0])
    cold.begin(1, 2, 3, 4, 5, 6, 7)
    drive(cold, sequences, chunk=9)  # type: ignore[arg-type]
    assert_as_cached(sequences, want)


def test_answers_are_the_cached_ones_whenever_the_copies_arrive(cold: Cold, cached: Cached) -> None:
    counts = cold.runner.assisted
    for seed in range(30):  # how many rows the processes get depends on how fast the copies arrive on a busy machine
        assisted_run(cold, cached, seed=seed)
        if seed >= 5 and counts.by_processes > 100 and counts.on_device > 0:
            break
    assert counts.by_processes > 100 and counts.on_device > 0, "rows began with processes and went on on the device"
    assert counts.repaired == counts.in_place == 0 and not cold.assist.failures


def test_a_copy_that_is_waited_for_layer_by_layer_gives_the_cached_answer(cold: Cold, cached: Cached, kernels: str) -> None:
    cold.mode = "layerwise"
    assisted_run(cold, cached)
    counts = cold.runner.assisted
    assert counts.on_device > 0 and counts.by_processes == counts.in_place == counts.layers_late == 0
    assert (counts.layer_waited_ns > 0) == (kernels == "cpu"), "on a device the stream waits, and its waits are not counted"


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_that_die_or_hang_at_any_point_change_no_answer_and_are_replaced(
    cold: Cold, cached: Cached, blow: signal.Signals
) -> None:
    cold.assist.watchdog_s = 0.15
    draw = random.Random(1)
    for seed in range(20):  # a blow may fall when its process has nothing to do, and is noticed only later
        if seed >= 5 and sum(cold.assist.failures.values()) > 2:
            break
        cold.ready(2)
        victim, steps = draw.choice(cold.assist.pids), draw.randrange(12)

        def strike(victim: int = victim, steps: list[int] = [steps]) -> None:  # noqa: B006 (a counter of this round)
            steps[0] -= 1
            if steps[0] == 0:
                threading.Timer(draw.random() * 0.004, _signal, [victim, blow]).start()

        cold.before_step = strike
        assisted_run(cold, cached, seed=seed)
    wait(lambda: cold.assist.capacity.processes == 2)
    cold.before_step = lambda: None
    assert sum(cold.assist.failures.values()) > 2
    if blow == signal.SIGSTOP:
        assert cold.runner.assisted.repaired > 0, "the rows of the stopped process were computed again elsewhere"
    before = cold.runner.assisted.by_processes
    for _ in range(10):  # on a busy machine a new process may be late, too
        cold.ready(2)
        assisted_run(cold, cached)
        if cold.runner.assisted.by_processes > before:
            break
    assert cold.runner.assisted.by_processes > before, "the new ones work"
    assert all(thread.name != "copy-watch" for thread in threading.enumerate()), "it ends with its step, also if that failed"


def test_late_processes_are_given_up_and_their_late_writes_have_no_effect(cold: Cold, cached: Cached) -> None:
    cold.assist.watchdog_s = 0.02
    pids, channels = cold.assist.pids, cold.assist.helpers([], 0).channels
    over = threading.Event()

    def resume_when_given_up() -> None:
        while not over.wait(0.001) and all(channel.state == "alive" for channel in channels):
            pass
        for pid in pids:
            _signal(pid, signal.SIGCONT)

    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    resuming = threading.Thread(target=resume_when_given_up)
    resuming.start()
    for seed in range(30):  # a busy machine may have copied every adapter before a row is given to a process
        assisted_run(cold, cached, seed=seed)
        if any(channel.state == "late" for channel in channels):
            break
    over.set()
    resuming.join()
    cold.assist.watchdog_s = PATIENT_S
    wait(lambda: cold.assist.failures["late"] >= 1 and cold.assist.capacity.processes == 2)
    assert set(pids) != set(cold.assist.pids)


def test_a_slot_that_is_freed_in_the_middle_of_prefill_serves_its_next_adapter(cold: Cold, cached: Cached) -> None:
    draw = random.Random(2)
    for _ in range(10):
        cold.begin(3)
        cut_short = requests(3, count=1, seed=draw.randrange(99))
        stop_after = draw.randrange(1, 4)
        with pytest.raises(InterruptedError):
            drive(_Interrupted(cold, stop_after), cut_short, chunk=3)  # type: ignore[arg-type]
        cold.runner.free_adapter(3)
        cold.hosts[3], cold.hosts[2] = cold.hosts[2], cold.hosts[3]  # adapter 2 comes to slot 3
        cold.begin(3)
        sequences = requests(3, -1, count=4, seed=draw.randrange(99))
        drive(cold, sequences, chunk=9)  # type: ignore[arg-type]
        cold.hosts[3], cold.hosts[2] = cold.hosts[2], cold.hosts[3]
        want = cached.run([Sequence(s.prompt, 2 if s.slot == 3 else -1, s.count) for s in sequences])
        assert_as_cached(sequences, want)
    cold.runner.free_adapter(3)
    assert cold.runner.link.bytes_queued == 0 and not cold.assist.failures


class _Interrupted:
    """Runs some steps, then an interruption."""

    def __init__(self, cold: Cold, steps: int) -> None:
        self._cold, self._steps = cold, steps

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._steps -= 1
        if self._steps < 0:
            raise InterruptedError
        return self._cold.forward(batch)


def test_without_processes_cold_rows_still_get_their_answers(
    checkpoint: tuple[Path, list[AdapterFixture]], cached: Cached, kernels: str
) -> None:
    cold = Cold(checkpoint, kernels, processes=1)
    cold.ready(1)
    cold.assist.close()
    counts = cold.runner.assisted
    for seed in range(30):  # a busy machine may have copied every adapter before a step needs it
        assisted_run(cold, cached, seed=seed)
        if computed := counts.in_place if kernels == "cpu" else counts.on_device:
            break
    assert cold.assist.capacity.processes == counts.by_processes == 0
    assert computed > 0, "a device waits for the copies"
    cold.runner.close()


def test_processes_are_small_import_no_torch_and_stay_on_their_core(cold: Cold) -> None:
    core = max(os.sched_getaffinity(0))
    pool = LoraPool(
        cold.runner.config.projection_shapes(), layers=3, slots=1, max_rank=8, bytes_total=1 << 20, dtype=torch.float32
    )
    pinned = CpuAssist(CpuEngine(threads=1), pool, cores=(core,), max_rows=16)
    wait(lambda: pinned.capacity.processes == 1)
    (pid,) = pinned.pids
    assert os.sched_getaffinity(pid) == {core}
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 40 << 10, "KiB"
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    assert pinned.capacity.row_s > 0
    pinned.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_thread_that_runs_steps_may_run_anywhere_between_them(checkpoint: tuple[Path, list[AdapterFixture]]) -> None:
    before = os.sched_getaffinity(0)
    model_dir, _ = checkpoint
    runner = make_runner(model_dir, [], threads=1, assist_cores=(max(before),))
    drive(runner, requests(-1, -1, count=2), chunk=9)
    assert os.sched_getaffinity(0) == before, "the next runner of this thread finds all cores"
    runner.close()


def test_a_process_that_cannot_start_is_tried_again_ever_more_seldom(cold: Cold, tmp_path: Path) -> None:
    engine = CpuEngine(threads=1)
    engine.path = tmp_path / "no-library.so"
    broken = CpuAssist(engine, cold.runner.pool, cores=(-1,), max_rows=16)
    wait(lambda: broken.failures["not started"] == 3)
    began = time.monotonic()
    assert broken.capacity.processes == 0
    broken.close()
    assert time.monotonic() - began < 5, "it does not sit out its wait"


def test_processes_go_when_the_worker_is_killed(checkpoint: tuple[Path, list[AdapterFixture]]) -> None:
    code = """if True:
        import sys, time, torch
        from motet.kernels import LoraPool
        from motet.kernels.cpu import CpuEngine
        from motet.services.worker.native.assist_processes import CpuAssist
        shapes = dict.fromkeys("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split(), (32, 32))
        pool = LoraPool(shapes, layers=1, slots=1, max_rank=8, bytes_total=1 << 16, dtype=torch.float32)
        assist = CpuAssist(CpuEngine(threads=1), pool, cores=(-1, -1), max_rows=16)
        while assist.capacity.processes < 2: time.sleep(0.01)
        print(*assist.pids, flush=True)
        time.sleep(60)
    """
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    assert len(pids) == 2
    worker.kill()
    worker.wait()
    worker.stdout.close()
    wait(lambda: not any(_runs(pid) for pid in pids), timeout_s=5)


def test_the_profile_of_the_base_follows_what_it_is_told() -> None:
    profile = AssistProfile()
    assert profile.layer_s(10) == 0.0, "nothing is known"
    for rows in (1, 100, 1, 200, 50):
        profile.base(rows, 1e-4 + rows * 1e-5)
    assert profile.layer_s(150) == pytest.approx(1e-4 + 150 * 1e-5, rel=0.01)


def test_the_profile_of_processes_tells_reading_from_computing() -> None:
    """Decodes of one row cost reading the adapter, prefills cost their rows. After some measurements both are predicted."""
    profile, elements = AssistProfile(), 100_000
    profile.row_s = 5e-9  # a first guess that is far off
    for step in range(400):
        rows = (1, 1, 1, 100)[step % 4]
        profile.processes(elements, rows * elements, elements * (2e-9 + rows * 1e-10))
    assert profile.read_s == pytest.approx(2e-9, rel=0.05)
    assert profile.row_s == pytest.approx(1e-10, rel=0.05)
    for _ in range(100):  # decodes alone get slower
        profile.processes(elements, elements, elements * 4e-9)
    assert profile.read_s + profile.row_s == pytest.approx(4e-9, rel=0.05)
    profile.processes(elements, elements, 10.0)
    assert profile.read_s < 5e-9, "that process had lost its core"


def _signal(pid: int, what: signal.Signals) -> None:
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return  # it was replaced meanwhile


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
