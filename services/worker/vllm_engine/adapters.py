"""The adapters of a vLLM core: which of them have a slot, and which weights vLLM keeps in host memory.

    files ──bring──> host memory and slot ──free──> host memory ──(the worker's copy is gone)──> removed

`policies/step/engine_entry.py` decides which adapters have slots. This file carries that out with commands that vLLM executes
between two steps. A task sends its command as soon as it begins, and tasks begin in the order in which they are made. So a
command for an adapter reaches vLLM before the requests that follow it, and only the reading of files is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from motet.services.worker.vllm_engine.peft_files import PeftAdapter
from motet.shared.clock import now_s
from motet.shared.errors import InvalidAdapter

NUMBERS = 0x7FFFFFFE
"""The largest number that vLLM may give an adapter; numbers begin at 1."""


@dataclass(eq=False)
class CoreAdapters:
    """The adapters that vLLM has in slots and in host memory.

    `spawn(work)` runs a coroutine as a task. `was_read(digest, seconds, error)`: vLLM has read an adapter's files, or has
    failed to.
    """

    spawn: Callable[[Coroutine[Any, Any, None]], None]
    was_read: Callable[[str, float, Exception | None], None]
    _in_slots: dict[str, PeftAdapter] = field(default_factory=dict)  # by digest
    _copies: dict[str, ref[PeftAdapter]] = field(default_factory=dict)  # in vLLM's host memory
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, digest: str) -> int:
        """vLLM's number of an adapter, derived from its digest; the next free number if two collide."""
        number = self._numbers.get(digest)
        if number is None:
            number, taken = int(digest[:8], 16) % NUMBERS + 1, set(self._numbers.values())
            while number in taken:
                number = number % NUMBERS + 1
            self._numbers[digest] = number
        return number

    def bring(self, client: Any, adapter: PeftAdapter) -> bool:
        """Load an adapter into a slot. Returns whether requests for it may follow at once.

        They may if vLLM has its weights, because vLLM handles orders in sequence. Otherwise vLLM reads files first, which can
        fail; `was_read` tells the result.
        """
        from vllm.lora.request import LoRARequest

        order = client.add_lora_async(LoRARequest(adapter.digest, self.number(adapter.digest), str(adapter.folder)))
        if adapter.digest in self._copies:
            self.spawn(_done(order))
            self._came(adapter)
            return True
        for digest in [digest for digest, copy in self._copies.items() if copy() is None]:
            self.spawn(_done(client.remove_lora_async(self.number(digest))))
            del self._copies[digest]
        self.spawn(self._read_files(client, adapter, order))
        return False

    def free(self, client: Any, digests: Iterable[str]) -> list[str]:
        """Take adapters out of their slots. Returns those that were in one.

        vLLM keeps their weights as long as the worker has its copy.
        """
        gone: list[str] = []
        for digest in digests:
            self.spawn(_done(client.collective_rpc_async("free_lora_slot", args=(self.number(digest),))))
            if self._in_slots.pop(digest, None) is not None:
                gone.append(digest)
        return gone

    def lost(self) -> list[str]:
        """The core died and lost its adapters. Returns those that were in slots."""
        gone = [*self._in_slots]
        self._in_slots.clear()
        self._copies.clear()
        return gone

    async def _read_files(self, client: Any, adapter: PeftAdapter, order: Coroutine[Any, Any, Any]) -> None:
        began_s = now_s()
        try:
            await order
            if adapter.as_stored:
                await self._check_used(client, adapter)
        except Exception as error:
            self.was_read(adapter.digest, now_s() - began_s, error)
        else:
            self._came(adapter)
            self.was_read(adapter.digest, now_s() - began_s, None)

    async def _check_used(self, client: Any, adapter: PeftAdapter) -> None:
        """Raise InvalidAdapter, and remove the adapter, if vLLM left out one of its layers in all of its processes."""
        number = self.number(adapter.digest)
        told = await client.collective_rpc_async("unused_layers", args=(number,))
        unused = set.intersection(*map(set, told))
        if unused:
            await client.remove_lora_async(number)
            raise InvalidAdapter(f"vLLM has no LoRA for its layer {min(unused)}")

    def _came(self, adapter: PeftAdapter) -> None:
        self._in_slots[adapter.digest], self._copies[adapter.digest] = adapter, ref(adapter)


async def _done(order: Coroutine[Any, Any, Any]) -> None:
    """Send a command that cannot fail unless the core has died."""
    with contextlib.suppress(Exception):
        await order
