"""The child process that compiles and renders the chat templates of adapters.

Jinja's sandbox keeps a template from the interpreter's objects. It limits neither time nor memory: a template may loop for
hours, or ask for a text of gigabytes. So a tenant's template runs only here, in a process with

    CPU time       `RENDER_CPU_S` per task; then the kernel ends the process, also in the middle of a C function
    memory         `MEMORY_BYTES` more than it has when it is ready
    files          none can be opened and no process started: what it needs was imported before

It reads tasks from stdin and writes one answer each to stdout, both as a length (4 bytes, big-endian) and msgpack.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.sandbox import SecurityError

import motet
from motet.shared.adapter_chat import AdapterChat, read_chat
from motet.shared.chat_templates import ChatTemplate, GenerationTag
from motet.shared.errors import BadRequest, ErrorInfo, InvalidAdapter, MotetError
from motet.shared.text_files import WITHOUT
from motet.shared.tokenizer import UnusableFile, load_tokenizer

RENDER_CPU_S = 1.0
INSPECT_CPU_S = 2.0
MEMORY_BYTES = 256 << 20
MAX_TEXT_CHARS = 8 << 20  # of a rendered conversation
MAX_ANSWER_BYTES = 40 << 20  # its UTF-8, at most, and a little more
_UNSAFE = (SecurityError, OverflowError, RecursionError)
COMPILED_MAX = 32  # templates kept compiled
LENGTH = struct.Struct(">I")
_ROOT = Path(motet.__file__).resolve().parents[1]
COMMAND = (
    sys.executable, "-I", "-c",
    f"import os, sys; os.nice(int(sys.argv[2])); sys.path.insert(0, {str(_ROOT)!r}); "
    "from motet.shared.chat_sandbox import main; main(sys.argv[1])",
)  # fmt: skip
"""The child's command line; two arguments follow: that of `main`, and how nice the process is, from its first line on."""


class Inspect(msgspec.Struct, tag="inspect"):
    """Read what an adapter's files say for chats. `vocab_size`: the base's."""

    texts: dict[str, str]
    vocab_size: int


class Render(msgspec.Struct, tag="render"):
    """Render a conversation."""

    source: str
    special: dict[str, str]
    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] | None = None


class Read(msgspec.Struct, tag="read"):
    """What the files say; None for nothing."""

    chat: AdapterChat | None


class Rendered(msgspec.Struct, tag="rendered"):
    """The conversation as text."""

    text: str


class Failed(msgspec.Struct, tag="failed"):
    """The refusal."""

    error: ErrorInfo


Task = Inspect | Render
Answer = Read | Rendered | Failed
_task = msgspec.msgpack.Decoder(Task)
answer_decoder = msgspec.msgpack.Decoder(Answer)


def environment() -> dict[str, str]:
    """The child's environment variables: nothing that is secret."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}


def framed(message: msgspec.Struct) -> bytes:
    """A message with its length."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def main(model_dir: str) -> None:
    """Run the child until stdin ends. `model_dir`: whose vocabulary adapters' tokens are compared with; "" for none."""
    base = _vocabulary(Path(model_dir)) if model_dir else (None, [])
    _prepare()
    _confine()
    compiled: dict[bytes, ChatTemplate] = {}
    while (task := _next(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S if isinstance(task, Render) else INSPECT_CPU_S)
        answer = _answer(task, compiled, *base)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(framed(answer))
        sys.stdout.buffer.flush()


def _answer(task: Task, compiled: dict[bytes, ChatTemplate], vocabulary: dict[str, int] | None, special: list[str]) -> Answer:
    try:
        if isinstance(task, Inspect):
            return Read(_inspected(task, vocabulary, special))
        return Rendered(_rendered(task, compiled))
    except MotetError as error:
        if isinstance(error.__context__, MemoryError):
            return Failed(BadRequest("the adapter's chat template takes more memory than is allowed", param="messages").info())
        return Failed(error.info())
    except (MemoryError, RecursionError):
        return Failed(BadRequest("the adapter's chat template takes more memory than is allowed", param="messages").info())


def _rendered(task: Render, compiled: dict[bytes, ChatTemplate]) -> str:
    key = msgspec.msgpack.encode([task.source, task.special])
    template = compiled.pop(key, None)
    if template is None:
        try:
            template = ChatTemplate(task.source, task.special, "the adapter's chat template")
        except UnusableFile as error:
            raise BadRequest(str(error), param="model") from None
    compiled[key] = template
    if len(compiled) > COMPILED_MAX:
        del compiled[next(iter(compiled))]
    text = template.render(
        task.messages,
        add_generation_prompt=task.add_generation_prompt,
        continue_final_message=task.continue_final_message,
        variables=task.variables,
    )
    if len(text) > MAX_TEXT_CHARS:
        raise BadRequest(f"the adapter's chat template makes more than {MAX_TEXT_CHARS} characters", param="messages")
    return text


def _inspected(task: Inspect, vocabulary: dict[str, int] | None, special: list[str]) -> AdapterChat | None:
    chat = read_chat(task.texts, vocabulary, special, task.vocab_size)
    user, assistant = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}
    for name, template in (chat.templates if chat is not None else {}).items():
        if private := _private_attribute(template.source):
            raise InvalidAdapter(f"the chat template {name!r:.80} reads the attribute {private!r:.80}; {WITHOUT}")
        for messages in ([user], [user, assistant, user]):
            try:
                _rendered(Render(template.source, chat.special, messages), {})  # type: ignore[union-attr]
            except BadRequest as error:  # a template may refuse a conversation; but not reach for what it may not see
                cause = error.__context__
                if isinstance(cause, MemoryError):
                    raise InvalidAdapter(f"its chat template takes more time or memory than is allowed; {WITHOUT}") from None
                if isinstance(cause, _UNSAFE) or "no loader" in str(cause):
                    raise InvalidAdapter(f"the chat template {name!r:.80} is not safe: {error.message}; {WITHOUT}") from None
    return chat


def _private_attribute(source: str) -> str:
    """An attribute that begins with an underscore and that the template reads; the sandbox shows nothing in its place."""
    parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", GenerationTag]).parse(source)
    attributes = [node.attr for node in parsed.find_all(nodes.Getattr)]
    constants = [node.arg.value for node in parsed.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)]
    return next((name for name in (*attributes, *constants) if isinstance(name, str) and name.startswith("__")), "")


def _next(stream: BinaryIO) -> Task | None:
    head = stream.read(LENGTH.size)
    return _task.decode(stream.read(*LENGTH.unpack(head))) if len(head) == LENGTH.size else None


def _vocabulary(model_dir: Path) -> tuple[dict[str, int] | None, list[str]]:
    """The base's tokens, and those that are left out of texts; (None, []) when its tokenizer cannot be read."""
    with contextlib.suppress(UnusableFile):
        backend = load_tokenizer(model_dir).backend
        added = backend.get_added_tokens_decoder().values()
        return backend.get_vocab(with_added_tokens=True), [token.content for token in added if token.special]
    return None, []


def _prepare() -> None:
    """Import what templates make Python import while they run: nothing can be opened afterwards."""
    datetime.datetime.now().strftime("%c")
    for source in (
        "{{ [1] | tojson }}{{ {} | pprint }}{{ [1, 2] | random }}{{ 'a' | urlize }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__ }}",
    ):
        with contextlib.suppress(BadRequest):
            ChatTemplate(source, {}, "").render([{"role": "user", "content": "a"}])
    with contextlib.suppress(UnusableFile):
        ChatTemplate("{% if %}", {}, "")


def _confine() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    limits = (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, present + MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    )
    for kind, limit in limits:
        resource.setrlimit(kind, (limit, limit))
