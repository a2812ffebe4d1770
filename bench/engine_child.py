"""A contestant of the engine bench in a process of its own, in an environment of its own: JSON lines in and out.

    parent -> child   the set-up, once; then laps: {"prompts": [[id, ..], ..], "adapters": [number or -1, ..], "tokens": n}
    child -> parent   {"ready": true}; then for each lap {"seconds": s, "outputs": [[id, ..], ..]}

All other output of a contestant goes to its log. Imports only the standard library, because a peer's environment does not have
Motet's packages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], list[int], int], list[list[int]]]
"""(prompts, adapter of each or -1, tokens to generate) -> the new tokens of each."""


def serve(make: Callable[[dict[str, Any]], Generate]) -> None:
    """Set up with `make`, then answer laps until the parent closes the connection."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    generate = make(json.loads(sys.stdin.readline()))
    answer({"ready": True})
    for line in sys.stdin:
        lap = json.loads(line)
        began = time.perf_counter()
        outputs = generate(lap["prompts"], lap["adapters"], lap["tokens"])
        answer({"seconds": time.perf_counter() - began, "outputs": outputs})
