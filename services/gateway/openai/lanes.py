"""Threads for work that would stall the event loop, and the bounded queues before them.

    requests   2 threads   long bodies: parsing, the chat template, tokenization
    counting   1 thread    /tokenize and /detokenize, so that they delay no request
    pictures   1 thread    source pictures of edits: decoded and scaled
    durable    1 thread    the same as `requests` for requests from NATS, which wait instead of being refused

Tenants take turns, and each has its share of the queue (`policies.tenant_shares`), so nobody waits for all work of another
tenant. A thread does not help against one long call that keeps the interpreter's lock; `body_shape` bounds those.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from motet.policies.tenant_shares import TenantShares
from motet.shared.errors import Overloaded

T = TypeVar("T")
INLINE_BYTES = 4096  # about 1.5 ms of tokenization: cheaper at once than in a thread
WAITING_MAX = 512
WAITING_BYTES_MAX = 64 << 20


class _Task(NamedTuple):
    work: Callable[[], Any]
    size: int
    tenant: str
    result: asyncio.Future[Any]


class Lane:
    """Some threads and the queue before them. `bounded`: whether a full queue refuses work."""

    def __init__(
        self, name: str, threads: int, *, waiting: int = WAITING_MAX, size: int = WAITING_BYTES_MAX, bounded: bool = True
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = threads
        self._bounded = bounded
        self._places, self._sizes = TenantShares(waiting), TenantShares(size)
        self._waiting: OrderedDict[str, deque[_Task]] = OrderedDict()  # the next tenant first

    async def run(self, work: Callable[[], T], size: int, tenant: str = "") -> T:
        """The result of `work`, which reads `size` bytes or characters: at once if these are few, else from a thread.

        Raises Overloaded when the tenant's share of the queue is full. Work whose caller has gone is not begun.
        """
        if size <= INLINE_BYTES:
            return work()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._bounded:
            if not self._places.fits(tenant, 1) or not self._sizes.take(tenant, size):
                raise Overloaded(f"{self._places.held(tenant)} long requests of this tenant wait already", retry_after_s=1.0)
            self._places.take(tenant, 1)
        self._waiting.setdefault(tenant, deque()).append(_Task(work, size, tenant, result))
        self._begin()
        return await result

    def _begin(self) -> None:
        """Give waiting work to idle threads, one piece of each tenant in turn."""
        while self._idle and self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            task = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if task.result.done():  # cancelled
                self._leave(task)
                continue
            self._idle -= 1
            self._threads.submit(task.work).add_done_callback(functools.partial(self._tell, task))

    def _tell(self, task: _Task, running: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            task.result.get_loop().call_soon_threadsafe(self._done, task, running)

    def _done(self, task: _Task, running: Future[Any]) -> None:
        self._idle += 1
        self._leave(task)
        if not task.result.done():
            error = running.exception()
            if error is None:
                task.result.set_result(running.result())
            else:
                task.result.set_exception(error)
        self._begin()

    def _leave(self, task: _Task) -> None:
        if self._bounded:
            self._places.give_back(task.tenant, 1)
            self._sizes.give_back(task.tenant, task.size)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Lanes:
    """The lanes of a gateway."""

    def __init__(self) -> None:
        self.requests = Lane("requests", 2)
        self.counting = Lane("counting", 1, waiting=32)
        self.pictures = Lane("pictures", 1, waiting=64)
        self.durable = Lane("durable", 1, bounded=False)

    def close(self) -> None:
        """Stop all threads."""
        for lane in (self.requests, self.counting, self.pictures, self.durable):
            lane.close()
