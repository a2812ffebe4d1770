"""A scheduler inside vLLM (`--scheduler-cls`) in which adapters take turns, for the comparison in `bench engines --inside`.

It does inside vLLM what `policies/step/engine_entry.py` does in front of it: a new request whose adapter finds no slot preempts
the requests of the adapter that has the fewest. Only vLLM's environment imports this file.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from motet.policies.step.engine_entry import TURN


class Turns(AsyncScheduler):
    """vLLM's scheduler, extended so that it makes room for new requests before each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drawn: dict[str, int] = {}  # tokens that a request had when it was last preempted

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Make room, then plan the step."""
        self._make_room()
        return super().schedule(*args, **kwargs)

    def _make_room(self) -> None:
        slots = self.lora_config.max_loras
        users: dict[str, list[Any]] = {}
        for one in self.running:
            if one.lora_request is not None:
                users.setdefault(one.lora_request.lora_name, []).append(one)
        for new in [one for one in self.waiting if one.lora_request is not None and not one.num_output_tokens]:
            name = new.lora_request.lora_name
            if len(users) >= slots and name not in users:
                able = [mine for mine in users.values() if all(self._had_turn(one) for one in mine)]
                if not able:
                    return
                leaving = min(able, key=len)
                del users[leaving[0].lora_request.lora_name]
                for one in leaving:
                    self.running.remove(one)
                    self._preempt_request(one, time.monotonic())
                    self.waiting.remove_request(one)  # it was put first, and would take its slot again
                    self.waiting.add_request(one)
                    self._drawn[one.request_id] = one.num_output_tokens
                self.waiting.remove_request(new)
                self.waiting.prepend_request(new)
            users.setdefault(name, []).append(new)

    def _had_turn(self, request: Any) -> bool:
        return bool(request.num_output_tokens - self._drawn.get(request.request_id, 0) >= TURN)
