"""Renders chat templates of adapters in child processes (`shared.chat_sandbox`), away from the event loop.

processes    `PROCESSES`, started when the first such chat comes; one that a template brings down is replaced
a tenant     one conversation at a time, so that a tenant with slow templates leaves a process to the others
waiting      at most `WAITING_MAX` conversations, `TENANT_WAITING_MAX` of one tenant; more get 429
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import msgspec

from motet.shared.chat_sandbox import (
    COMMAND,
    LENGTH,
    MAX_ANSWER_BYTES,
    RENDER_CPU_S,
    Failed,
    Render,
    Rendered,
    answer_decoder,
    environment,
    framed,
)
from motet.shared.errors import BadRequest, MotetError, Overloaded, Unavailable, from_info
from motet.shared.telemetry import logger

log = logger("motet.gateway.rendering")
PROCESSES = 2
WAITING_MAX, TENANT_WAITING_MAX = 64, 16
WALL_S = 10.0  # for one conversation, on a machine with other work; its CPU time is limited to `RENDER_CPU_S`
NICENESS = 5  # of the processes: an event loop on the same core goes first
_PARAM = "messages"


class Renderers:
    """The child processes of one gateway."""

    def __init__(self) -> None:
        self._idle: list[_Child] = []
        self._slots = asyncio.Semaphore(PROCESSES)
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def render(self, tenant: str, task: Render) -> str:
        """The conversation as text.

        Raises BadRequest when the template refuses it or takes too much time or memory, Overloaded when too many wait.
        """
        if self._waiting.total() >= WAITING_MAX or self._waiting[tenant] >= TENANT_WAITING_MAX:
            raise Overloaded("too many chats wait for their adapters' chat templates", retry_after_s=1.0)
        self._waiting[tenant] += 1
        try:
            async with self._turns.setdefault(tenant, asyncio.Lock()), self._slots, self._child() as child:
                return await child.render(task)
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._turns[tenant]

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            await self._idle.pop().kill()

    @contextlib.asynccontextmanager
    async def _child(self) -> AsyncIterator[_Child]:
        """A process for one conversation. It is kept only if it has answered: an unread answer would be another one's."""
        child = self._idle.pop() if self._idle else await _Child.start()
        try:
            yield child
        finally:
            if child.answered:
                self._idle.append(child)
            else:
                await child.kill()


class _Child:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.answered = False

    @classmethod
    async def start(cls) -> _Child:
        """Raises Unavailable when no process can be started."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, "", str(NICENESS), stdin=pipe, stdout=pipe, stderr=null, env=environment(), cwd="/"
            )
        except OSError as error:
            raise Unavailable(f"no process for chat templates can be started: {error.strerror}") from error
        return cls(process)

    async def render(self, task: Render) -> str:
        self.answered = False
        try:
            async with asyncio.timeout(WALL_S):
                self._stdin.write(framed(task))
                await self._stdin.drain()
                [size] = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))
                if size > MAX_ANSWER_BYTES:
                    raise BadRequest("the adapter's chat template makes too much text", param=_PARAM)
                answer = answer_decoder.decode(await self._stdout.readexactly(size))
        except TimeoutError:
            raise Unavailable(f"the adapter's chat template was not rendered within {WALL_S:g} s", retry_after_s=1.0) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            log.info("a chat template was stopped", extra={"status": await self._process.wait()})
            raise BadRequest(
                f"the adapter's chat template takes more than {RENDER_CPU_S:g} s or more memory than is allowed", param=_PARAM
            ) from None
        except msgspec.MsgspecError as error:
            raise MotetError(f"the process for chat templates answers nonsense: {error}") from None
        self.answered = True
        if isinstance(answer, Failed):
            raise from_info(answer.error)
        assert isinstance(answer, Rendered), "it was asked to render"
        return answer.text

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._stdin.close()
        await self._process.wait()
