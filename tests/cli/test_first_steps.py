"""Promise: a start that cannot succeed ends with one line that says what is wrong and what to do; logs are a command away."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from motet.cli.client import Client
from motet.cli.logs import logs
from motet.cli.progress import Progress
from motet.cli.stack import GIB, LEAST_FREE_BYTES, Stack
from motet.cli.up_options import stack_options
from motet.examples.demo import DEMO
from motet.shared.config import ConfigError

USAGE = shutil.disk_usage("/")


class Unwatched:
    def changed(self, name: str, state: object, note: str) -> None:
        """Nobody looks."""


def start(data_dir: Path, **options: object) -> str:
    """The reason why a stack does not start."""
    stack = Stack(stack_options({"demo": True, "data_dir": str(data_dir), "port": "0"} | options, {}), Unwatched())

    async def run() -> None:
        try:
            await stack.start()
        finally:
            await stack.stop()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(run())
    return str(caught.value)


def test_a_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "it is a file, not a directory" in start(tmp_path / "file")
    assert "Not a directory" in start(tmp_path / "file" / "below")


@pytest.mark.parametrize(("number", "said"), [(errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only file system")])
def test_a_data_directory_that_cannot_be_written_is_named(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert start(tmp_path / "data").startswith(f"--data-dir: cannot write in {tmp_path / 'data'}: {said}. Choose")


def test_a_full_disk_is_named_with_the_room_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("motet.cli.stack.tempfile.NamedTemporaryFile", refuse)
    assert "the disk is full, and 4.4 GiB are needed" in start(tmp_path / "data")


def test_a_disk_that_is_too_small_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: USAGE._replace(free=GIB))
    said = start(tmp_path / "data")
    assert f"the disk of {tmp_path / 'data'} has 1.0 GiB free, and 4.4 GiB are needed" in said and "\n" not in said
    assert "and 3.1 GiB are needed" in start(tmp_path / "data", tenant_stream_mib="64")
    (tmp_path / "data" / "nats" / "jetstream").mkdir(parents=True)  # its streams have their room already
    monkeypatch.setattr(shutil, "disk_usage", lambda _: USAGE._replace(free=LEAST_FREE_BYTES - 1))
    assert "0.2 GiB are needed" in start(tmp_path / "data")


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ("up", "--demo", "--port", "0", "--data-dir", str(tmp_path / "file"))
    done = subprocess.run([sys.executable, "-m", "motet", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1


def test_a_url_may_end_with_the_version_as_clients_of_openai_give_it() -> None:
    for url in ("http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"):
        assert Client(url).url == "http://host:8000"


def test_progress_in_a_log_is_one_line_for_each_change_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for note in ("", "loading: 0.10 of 4.30 GB", "loading: 2.20 of 4.30 GB", "warming up"):
        progress.changed("worker-1", "starting", note)
    progress.changed("worker-1", "ready", "")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and "0.10 of" in lines[1] and "warming up" in lines[2] and lines[3].endswith("ready")


def test_logs_are_those_of_all_processes_of_a_kind_or_of_one(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("worker-1", "worker-2", "registry"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"first of {name}\nlast of {name}\n")

    def shown(*words: str) -> list[str]:
        result = CliRunner().invoke(logs, ["--data-dir", str(tmp_path), *words])
        return result.output.splitlines() if result.exit_code == 0 else [f"{result.exit_code} {result.output}"]

    assert shown("registry") == ["first of registry", "last of registry"]
    assert shown("worker", "-n", "1") == ["worker-1 | last of worker-1", "worker-2 | last of worker-2"]
    assert len(shown()) == 6
    assert "there are: registry, worker-1, worker-2" in " ".join(shown("gateway"))
    assert "no logs in" in CliRunner().invoke(logs, ["--data-dir", str(tmp_path / "none")]).output


def test_logs_are_followed_also_when_they_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "worker-1.log"
    log.write_text("before\n")
    words = ("-m", "motet", "logs", "worker-1", "-f", "--data-dir", str(tmp_path))
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "before\n"
        with log.open("a") as sink:
            sink.write("half")
            sink.flush()
            sink.write(" a line\n")
        assert process.stdout.readline() == "half a line\n"
        log.replace(tmp_path / "logs" / "worker-1.log.1")
        log.write_text("new\n")
        assert process.stdout.readline() == "new\n"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=10)
        assert time.monotonic() - began < 5
    finally:
        process.kill()
        process.stdout.close()


def test_a_damaged_checkpoint_is_found_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO / "model", model)
    os.truncate(model / "model.safetensors", 500)
    with pytest.raises(ConfigError, match=r"--model: .*/model\.safetensors is not a readable safetensors file"):
        stack_options({"model": str(model)}, {})
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"--model: .* has no config\.json"):
        stack_options({"model": str(model)}, {})
