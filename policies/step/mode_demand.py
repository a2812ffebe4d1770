"""What the requests of an engine ask of its modes: the arguments of `policies.step.merge_decision.Modes.choose`."""

from __future__ import annotations

from motet.policies.step.batch_state import AdmissionState, S, order_of

MODE_WINDOW = 512
"""Maximum waiting sequences that a step examines for those of its mode. While an adapter is merged, the others' sequences
gather at the head of the queue, and the adapter's own must still be found behind them."""


def mode_demand(state: AdmissionState[S], seats: int) -> tuple[dict[str, int], dict[str, int], int]:
    """The arguments of `Modes.choose`: (fcfs, alone, seats).

    `fcfs`: the requests that first come, first served would compute, counted by adapter. An earlier waiting request counts
    instead of a later running one. `alone`: the requests of each adapter that could be computed if there were no other
    adapters, without those whose adapter still has to be copied beside the steps. `seats`: how many requests fit. At most
    MODE_WINDOW waiting sequences are considered.
    """
    fcfs: dict[str, int] = {}
    for seq in state.running:
        fcfs[seq.adapter] = fcfs.get(seq.adapter, 0) + 1
    alone, kv, slots = dict(fcfs), state.kv, state.adapters
    room, blocks = max(0, seats - len(state.running)), kv.free - len(state.running)
    fitting = 0
    waiting: dict[str, int] = {}
    for seq in state.waiting[:MODE_WINDOW]:
        adapter = seq.adapter
        waiting[adapter] = waiting.get(adapter, 0) + 1
        if room > fitting:
            blocks -= kv.blocks_for(seq.length)
            if blocks < 0:
                room = fitting
            else:
                fitting += 1
                fcfs[adapter] = fcfs.get(adapter, 0) + 1
    for adapter, count in waiting.items():
        count = min(count, fitting)
        ready = not slots.asynchronous or not adapter or (adapter in slots and adapter not in slots.loading)
        if count and ready:
            alone[adapter] = alone.get(adapter, 0) + count
    for seq, instead in zip(reversed(state.running), state.waiting[fitting:MODE_WINDOW], strict=False):
        if order_of(seq) < order_of(instead):
            break
        fcfs[instead.adapter] = fcfs.get(instead.adapter, 0) + 1
        fcfs[seq.adapter] -= 1
    return {adapter: count for adapter, count in fcfs.items() if count}, alone, len(state.running) + fitting
