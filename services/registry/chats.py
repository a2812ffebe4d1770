"""Reads what an adapter brings for chats, in a confined child process (`shared.chat_sandbox`)."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from motet.services.registry.files import shown
from motet.shared.adapter_chat import AdapterChat
from motet.shared.chat_sandbox import COMMAND, LENGTH, Failed, Inspect, Read, answer_decoder, environment, framed
from motet.shared.errors import InvalidAdapter, MotetError, from_info
from motet.shared.telemetry import logger
from motet.shared.text_files import WITHOUT

log = logger("motet.registry.chats")
WALL_S = 60.0  # the child may share its core; its CPU time is limited to a few seconds
REMEMBERED = 64  # most adapters of a base have the same tokenizer files


class ChatReader:
    """Reads the chat files of adapters of one base model. For use from several threads."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        self._model_dir = str(model_dir) if (model_dir / "tokenizer.json").is_file() else ""
        self._vocab_size = vocab_size or 1 << 31
        self._known: dict[bytes, AdapterChat | None] = {}
        self._lock = threading.Lock()

    def read(self, files: Mapping[str, bytes]) -> AdapterChat | None:
        """What the files say; None if they say nothing. Blocks. Raises InvalidAdapter naming the file or the token."""
        if not files:
            return None
        try:
            task = framed(Inspect({name: data.decode() for name, data in files.items()}, self._vocab_size))
        except UnicodeDecodeError as error:
            raise InvalidAdapter(f"a file beside the weights is not UTF-8 text: {shown(error)}; {WITHOUT}") from None
        with self._lock:
            if task in self._known:
                return self._known[task]
        chat = self._in_child(task)
        with self._lock:
            self._known[task] = chat
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        return chat

    def _in_child(self, task: bytes) -> AdapterChat | None:
        too_much = InvalidAdapter(f"its chat template takes more time or memory than is allowed; {WITHOUT}")
        try:
            child = subprocess.run(
                [*COMMAND, self._model_dir, "0"],
                input=task,
                capture_output=True,
                timeout=WALL_S,
                check=False,
                env=environment(),
                cwd="/",
            )
        except subprocess.TimeoutExpired:
            raise too_much from None
        if child.returncode < 0:  # by a limit
            raise too_much
        try:
            answer = answer_decoder.decode(child.stdout[LENGTH.size :])
        except msgspec.MsgspecError:
            log.error("reading a chat template failed", extra={"output": child.stderr[-2000:].decode(errors="replace")})
            raise MotetError("the chat template could not be read: the process that reads it failed") from None
        if isinstance(answer, Failed):
            error = from_info(answer.error)
            raise error if isinstance(error, InvalidAdapter) else InvalidAdapter(f"{error.message}; {WITHOUT}")
        assert isinstance(answer, Read), "it was asked to inspect"
        return answer.chat
