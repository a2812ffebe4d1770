"""Decides which pinned adapters a worker keeps.

A pinned adapter is kept in device and host memory whether it is used or not. Pinned adapters have half of a worker's adapter
memory and slots at most (`WorkerLimits.pin_bytes`, `pin_slots`), so that they never take all room from the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from motet.shared.model import AdapterRef, WorkerLimits

PIN_SHARE = 2
"""One in this many slots, and bytes, of a worker may be pinned."""


def within(pinned: Iterable[AdapterRef], limits: WorkerLimits) -> dict[str, AdapterRef]:
    """The pinned adapters that fit, by digest, tried in the given order. One that is too large is skipped."""
    kept: dict[str, AdapterRef] = {}
    left = limits.pin_bytes
    for ref in pinned:
        if ref.digest not in kept and len(kept) < limits.pin_slots and ref.size_bytes <= left:
            kept[ref.digest] = ref
            left -= ref.size_bytes
    return kept
