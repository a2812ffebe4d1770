"""Ten mistakes of a first day. Each is made as a person makes it, and its answer must name what is wrong and what to do."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support_adapters import TINY, write_adapter

if TYPE_CHECKING:
    from tests.first_hour.newcomer import Newcomer

LINES = 6  # more are no explanation


@dataclass(frozen=True)
class Said:
    """What a command printed or a server answered; `status` 0 means success."""

    text: str
    status: int


@dataclass(frozen=True)
class Mistake:
    """`wrong` and `remedy` are patterns that the answer must contain: what is wrong, and what to do."""

    name: str
    make: Callable[[Newcomer], Said]
    wrong: str
    remedy: str


def problem(mistake: Mistake, said: Said) -> str:
    """Why an answer does not explain the mistake; "" if it does."""
    if said.status == 0:
        return "it is taken for a success"
    if "Traceback" in said.text:
        return "a traceback"
    if (lines := len(said.text.splitlines())) > LINES:
        return f"{lines} lines"
    missing = [pattern for pattern in (mistake.wrong, mistake.remedy) if not re.search(pattern, said.text, re.IGNORECASE)]
    return f"not a word of {' or '.join(missing)}" if missing else ""


def another_servers_command(person: Newcomer) -> Said:
    return person.motet("serve", "examples/demo/model")


def misspelt_option(person: Newcomer) -> Said:
    return person.motet("up", "--demo", "--max-modle-len", "512")


def model_that_is_not_there(person: Newcomer) -> Said:
    return person.motet("up", "--model", "./my-llama")


def data_directory_without_permission(person: Newcomer) -> Said:
    """Below a file, since an administrator may write everywhere else."""
    return person.motet("up", "--demo", "--port", "0", "--data-dir", "README.md/data")


def port_in_use(person: Newcomer) -> Said:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return person.motet("up", "--demo", "--data-dir", "elsewhere", "--port", str(taken.getsockname()[1]))


def misspelt_adapter(person: Newcomer) -> Said:
    return person.motet("chat", "--model", "uper-case", "hello")


def adapter_of_a_large_rank(person: Newcomer) -> Said:
    shapes = _shapes(person.home / "examples/demo/model/config.json")
    return person.motet("adapters", "add", "large", str(write_adapter(person.directory / "large", shapes=shapes, rank=512)))


def adapter_of_another_base(person: Newcomer) -> Said:
    return person.motet("adapters", "add", "other", str(write_adapter(person.directory / "other", shapes=TINY)))


def misspelt_field(person: Newcomer) -> Said:
    body = {"model": "upper-case", "messages": [{"role": "user", "content": "hello"}], "max_token": 5}
    return person.refusal("/v1/chat/completions", body)


def chat_with_a_base_model_without_template(person: Newcomer) -> Said:
    base = person.directory / "base"
    shutil.copytree(person.home / "examples/demo/model", base, ignore=shutil.ignore_patterns("chat_template*"))
    config = base / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}))
    python = str(person.home / ".venv/bin/python")
    started = person.start([python, "-m", "motet", "up", "--model", str(base), "--port", "0", "--data-dir", "base-data"])
    if started.status:
        return started
    port = re.search(r"http://127\.0\.0\.1:(\d+)/v1", started.text)
    assert port is not None, started.text
    try:
        body = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}
        return person.refusal("/v1/chat/completions", body, int(port[1]))
    finally:
        person.end()


MISTAKES = (
    Mistake("a command of another server", another_servers_command, "serve", "motet up"),
    Mistake("a misspelt option", misspelt_option, "--max-modle-len", "--max-model-len"),
    Mistake("a model that is not there", model_that_is_not_there, "my-llama", "directory.*Hugging Face id"),
    Mistake("a data directory that cannot be written", data_directory_without_permission, "README.md/data", "choose"),
    Mistake("a port in use", port_in_use, "in use", "--port 0"),
    Mistake("a misspelt adapter", misspelt_adapter, "uper-case", "upper-case"),
    Mistake("an adapter of too large a rank", adapter_of_a_large_rank, "rank 512", "--max-lora-rank"),
    Mistake("an adapter of another base model", adapter_of_another_base, "shape|layers", "another base model"),
    Mistake("a misspelt field", misspelt_field, "max_token", "max_tokens"),
    Mistake(
        "a chat without a template", chat_with_a_base_model_without_template, "template", "--chat-template|/v1/completions"
    ),
)


def _shapes(config: Path) -> object:
    from motet.shared.base_shapes import read_shapes

    return read_shapes(config.parent)
