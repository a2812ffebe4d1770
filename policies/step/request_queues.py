"""Which waiting requests may join the batch next, and in which order.

`policies.step.batch_admission` asks for candidates before every step and admits them while seats, tokens, KV blocks and adapter
memory last. This module decides about the order, that one about memory.

    fcfs        by priority, due time and arrival (no object: `batch_admission` does it)
    auto        the same, but while the first one is late, those that can still be in time go before those that cannot
    motet       one queue by due time, delayed in proportion to the request's size and to the service of its tenant and adapter

Others to compare with, such as Chameleon's queues by size with quotas, are in bench/rivals. Plug-ins add their own to `QUEUES`
(docs/extending.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from typing import Any, Generic, Protocol

from motet.policies.step.batch_state import PATIENCE, AdmissionState, S
from motet.shared.model import Mechanism
from motet.shared.tables import Table

WINDOW = 128
"""Maximum candidates per step of an order without quotas."""
TTFT_SLO_S = 5.0
"""Assumed objective of requests without one."""
SOON = 0.125
"""The share of a TTFT objective that a request needs to get its first token once it begins."""
TURN = 4


class Queues(Protocol[S]):
    """Decides which waiting sequences may join the batch, and in which order."""

    squashes: bool
    """Whether a sequence overtakes one without adapter memory only if it is predicted to end in time, and is preempted when
    the prediction was wrong."""

    def arrived(self, seq: S, now_s: float) -> None:
        """The sequence waits from now on."""

    def candidates(self, state: AdmissionState[S], now_s: float) -> list[S]:
        """The sequences of `state.waiting` that may join the batch in this step, in the order in which they are tried."""

    def began(self, seq: S, now_s: float) -> None:
        """The sequence joined the batch."""

    def stopped(self, seq: S, now_s: float) -> None:
        """The sequence left the batch: it was preempted, or it ended."""

    def left(self, seq: S) -> None:
        """The sequence has ended."""


@dataclass
class _Flow:
    """The requests of one tenant for one adapter. `until_s`: when the flow's share of the engine will have served them all."""

    requests: int = 0  # waiting or running
    until_s: float = 0.0


@dataclass(eq=False)
class PutOff(Generic[S]):
    """One queue, ordered by due time plus delays for the request's size and for its flow's use.

    `size`: the delay of a request of mean size, in TTFT objectives; twice the size is delayed twice as much. Short requests
    overtake long ones, but no request waits for ever.

    `fair`: a flow is a tenant's requests for one adapter. The engine's rate is divided by weight among tenants with requests
    here, and equally among the adapters of each. A virtual clock says when a flow's share will have served all its requests.
    The flow that is most ahead of its share is delayed by `fair` objectives, the others in proportion.

    `shared`: a request whose adapter is in use needs no memory for it and goes ahead by `shared` objectives.
    """

    size: float = 0.1
    fair: float = 1.0
    shared: float = 0.25
    squashes: bool = False
    _flows: dict[tuple[str, str], _Flow] = field(default_factory=dict)
    _tenants: dict[str, tuple[int, float]] = field(default_factory=dict)  # flows with requests here, weight
    _places: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # due time with its delay, and how much sooner if shared
    _mean_tokens: float = 0.0
    _rate: float = 0.0  # tokens per second, as requests began lately
    _begun: float = 0.0
    _since_s: float = 0.0

    def arrived(self, seq: S, now_s: float) -> None:
        """Compute the request's place."""
        tokens = seq.length
        self._mean_tokens += (tokens - self._mean_tokens) * (0.01 if self._mean_tokens else 1.0)
        slo_s = max(0.0, seq.due_s - now_s) / PATIENCE or TTFT_SLO_S
        off = self.size * tokens / self._mean_tokens
        if ahead_s := self._ahead_s(seq, tokens, now_s):
            most_s = max(flow.until_s for flow in self._flows.values()) - now_s
            off += self.fair * ahead_s / max(most_s, slo_s)
        self._places[seq.order] = seq.due_s + off * slo_s, self.shared * slo_s

    def _ahead_s(self, seq: S, tokens: int, now_s: float) -> float:
        """The time by which the flow is ahead of its share."""
        key = seq.tenant, seq.adapter
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow()
            flows, _ = self._tenants.get(seq.tenant, (0, 0.0))
            self._tenants[seq.tenant] = flows + 1, seq.tenant_weight
        flow.requests += 1
        if not self._rate:
            return 0.0
        flows, weight = self._tenants[seq.tenant]
        share = weight / sum(weight for _, weight in self._tenants.values()) / flows
        ahead_s = max(0.0, flow.until_s - now_s)
        flow.until_s = max(flow.until_s, now_s) + tokens / (self._rate * share)
        return ahead_s

    def began(self, seq: S, now_s: float) -> None:
        """Measure the engine's rate, from the requests that begin to run."""
        self._begun += seq.length
        if now_s - self._since_s >= 1.0:
            rate = self._begun / (now_s - self._since_s)
            self._rate += (rate - self._rate) * (0.1 if self._rate else 1.0)
            self._begun, self._since_s = 0.0, now_s

    def stopped(self, seq: S, now_s: float) -> None:
        """A preempted request keeps its place."""

    def left(self, seq: S) -> None:
        """The request has ended, and its flow with it if it was the last one."""
        if self._places.pop(seq.order, None) is None:
            return
        key = seq.tenant, seq.adapter
        flow = self._flows[key]
        flow.requests -= 1
        if not flow.requests:
            del self._flows[key]
            flows, weight = self._tenants[seq.tenant]
            if flows > 1:
                self._tenants[seq.tenant] = flows - 1, weight
            else:
                del self._tenants[seq.tenant]

    def candidates(self, state: AdmissionState[S], now_s: float) -> list[S]:
        """The waiting requests with the first places."""
        places, users = self._places, state.adapters.users

        def place(seq: S) -> tuple[int, float, int]:
            until_s, sooner_s = places[seq.order]
            return seq.priority, until_s - sooner_s if not seq.adapter or users(seq.adapter) else until_s, seq.order

        return nsmallest(WINDOW, state.waiting, key=place)


@dataclass(eq=False)
class LateLast(Generic[S]):
    """First come, first served, but requests that have missed their TTFT objective come after those that can still keep it.

    A late request gains nothing from a turn that another one needs to be in time. One is late that has not begun when `SOON` of
    its objective is left. While the first waiting request is late, those in time go first. So that none waits for ever, after
    `TURN` requests in time the first one is served, late or not. Priority goes before all of this. A preempted request, and one
    without an objective, is never late.
    """

    squashes: bool = False
    late: int = 0
    """Late requests that waited at the last decision."""
    _late_s: dict[int, float] = field(default_factory=dict)  # when each request is late
    _in_time: int = 0  # requests that began in time since a late one did

    def arrived(self, seq: S, now_s: float) -> None:
        """Remember when the request will be late."""
        slo_s = max(0.0, seq.due_s - now_s) / PATIENCE
        self._late_s[seq.order] = now_s + (1.0 - SOON) * slo_s if slo_s else inf

    def began(self, seq: S, now_s: float) -> None:
        """Count the turns. Should it be preempted, it is not late."""
        self._in_time = 0 if self._late_s[seq.order] <= now_s else self._in_time + 1
        self._late_s[seq.order] = inf

    def stopped(self, seq: S, now_s: float) -> None:
        """A preempted request waits in its place."""

    def left(self, seq: S) -> None:
        """The request has ended."""
        self._late_s.pop(seq.order, None)

    def holds_s(self, state: AdmissionState[S], now_s: float) -> float:
        """When the next waiting request is late."""
        return min([at_s for seq in state.waiting if (at_s := self._late_s[seq.order]) > now_s], default=inf)

    def candidates(self, state: AdmissionState[S], now_s: float) -> list[S]:
        """The waiting requests as they came, or, while the first of them is late, those in time before the others."""
        waiting, late_s = state.waiting, self._late_s
        self.late = 0
        if not waiting or late_s[waiting[0].order] > now_s:
            return waiting
        late = {seq.order for seq in waiting if late_s[seq.order] <= now_s}
        self.late = len(late)
        if self._in_time >= TURN:
            late.remove(waiting[0].order)
        return sorted(waiting, key=lambda seq: (seq.priority, seq.order in late))[:WINDOW]


def order_holds_s(queues: object, state: AdmissionState[S], now_s: float) -> float:
    """Until when waiting requests stay in this order if nothing else happens."""
    if not isinstance(queues, LateLast):
        return inf
    return queues.holds_s(state, now_s)


def mechanism_of(queues: object, waiting: int) -> dict[str, Mechanism]:
    """For people: whether these queues, with so many waiting requests, let late ones wait. Empty for those that never do."""
    if not isinstance(queues, LateLast):
        return {}
    if waiting and queues.late:
        return {"queues": Mechanism("on", f"{queues.late} of {waiting} waiting requests are late")}
    return {"queues": Mechanism("waiting", "no waiting request is late")}


class MakeQueues(Protocol):
    """Makes the queues of one engine; None for first come, first served."""

    def __call__(self, *, total_tokens: float, token_bytes: float) -> Queues[Any] | None:
        """`total_tokens`: what KV cache and adapter memory hold together; `token_bytes`: the KV bytes of one token."""


QUEUES: Table[MakeQueues] = Table(
    {"fcfs": lambda **memory: None, "auto": lambda **memory: LateLast(), "motet": lambda **memory: PutOff()}
)


def make_queues(name: str, *, total_tokens: float, token_bytes: float) -> Queues[S] | None:
    """The queues with this name for one engine; None for first come, first served. Raises UnknownName."""
    return QUEUES.named(name)(total_tokens=total_tokens, token_bytes=token_bytes)
