"""Which waiting requests may join the batch next, and in which order.

`policies.step.batch_admission` asks for candidates before every step and admits them while seats, tokens, KV blocks and adapter
memory last. This module decides about the order, that one about memory.

    fcfs        by priority, due time and arrival (no object: `batch_admission` does it)
    auto        the same, but requests that have missed their objective come after those that have not
    motet       one queue by due time, delayed in proportion to the request's size and to the service of its tenant and adapter

Others to compare with, such as Chameleon's queues by size with quotas, are in bench/rivals. Plug-ins add their own to `QUEUES`
(docs/extending.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from typing import Any, Protocol

from motet.policies.step.batch_state import PATIENCE, AdmissionState, S, insert
from motet.shared.model import Mechanism
from motet.shared.tables import Table

WINDOW = 128
"""Maximum candidates per step of an order without quotas."""
TTFT_SLO_S = 5.0
"""Assumed objective of requests without one."""
IN_TIME = 0.9
"""The share of a TTFT objective after which a waiting request is late: the rest is what its first token takes."""
TURN = 32
"""Requests that begin from one late one to the next while others are in time."""


class Queues(Protocol[S]):
    """Decides which waiting sequences may join the batch, and in which order. To be inherited from: the last two need not be
    written.
    """

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

    def holds_s(self, now_s: float) -> float:
        """Until when waiting sequences stay in this order if nothing else happens."""
        return inf

    def mechanism(self, waiting: int) -> Mechanism | None:
        """For people: whether an order that turns on by itself is on, with so many waiting, and why. None for others."""
        return None


@dataclass
class _Flow:
    """The requests of one tenant for one adapter. `until_s`: when the flow's share of the engine will have served them all."""

    requests: int = 0  # waiting or running
    until_s: float = 0.0


@dataclass(eq=False)
class PutOff(Queues[S]):
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


@dataclass
class _Waiting:
    """A request that has not begun, due at `due_s` at first, and late from `late_s` on.

    `look_s`: when it is late, or, if it is already, when it has to be put off again.
    """

    slo_s: float
    due_s: float
    late_s: float
    look_s: float
    late: bool = False


@dataclass(eq=False)
class LateLast(Queues[S]):
    """First come, first served, but requests that have missed their TTFT objective come after those that can still keep it.

    Once there are too many requests, a late one that goes first makes the next one late too. A request is late that has waited
    for IN_TIME of its objective. From then on it stays behind all requests of the same objective that are in time, and before
    those with a much longer one. So that none waits for ever, after TURN others the oldest late one gets its place
    back. Priority goes before all of this. A request without an objective, or that began before, is never late.
    """

    squashes: bool = False
    late: int = 0
    """Late requests that wait."""
    _next_s: float = inf  # until then no request becomes late, and none has to be put off again
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _turns: int = 0  # requests that began since a late one had its turn
    _turn_of: int | None = None  # the late one that has its turn

    def arrived(self, seq: S, now_s: float) -> None:
        """Remember when the request will be late."""
        if seq.due_s > now_s:
            slo_s = (seq.due_s - now_s) / PATIENCE
            late_s = now_s + IN_TIME * slo_s
            self._waiting[seq.order] = _Waiting(slo_s, seq.due_s, late_s, late_s)
            self._next_s = min(self._next_s, late_s)

    def began(self, seq: S, now_s: float) -> None:
        """Count the turns. Should it be preempted, it waits in its first place."""
        one = self._waiting.get(seq.order)
        self._turns = 0 if not self.late or (one is not None and one.late) else self._turns + 1
        self.left(seq)
        if self.late and self._turns >= TURN:
            self._turns = 0
            self._turn_of = min(order for order, one in self._waiting.items() if one.late)

    def stopped(self, seq: S, now_s: float) -> None:
        """A preempted request waits in its place."""

    def left(self, seq: S) -> None:
        """The request has ended. Should another worker get it, it takes its first place along."""
        one = self._waiting.pop(seq.order, None)
        if one is not None:
            seq.due_s = one.due_s
            self.late -= one.late
        if seq.order == self._turn_of:
            self._turn_of = None

    def holds_s(self, now_s: float) -> float:
        """Until when the order stays as it is if nothing else happens."""
        return self._next_s if self._turn_of is None else now_s

    def mechanism(self, waiting: int) -> Mechanism:
        """Whether late requests wait behind others."""
        if waiting and self.late:
            return Mechanism("on", f"{self.late} of {waiting} waiting requests are late")
        return Mechanism("waiting", "no waiting request is late")

    def candidates(self, state: AdmissionState[S], now_s: float) -> list[S]:
        """The waiting requests in their order."""
        if now_s >= self._next_s:
            self._put_off(state, now_s)
        if self._turn_of is not None:
            seq = next(seq for seq in state.waiting if seq.order == self._turn_of)
            self._place(state, seq, self._waiting[seq.order].due_s)
            self.left(seq)
        return state.waiting

    def _put_off(self, state: AdmissionState[S], now_s: float) -> None:
        """All requests in time are due within PATIENCE objectives, also those that come before the next look at a late one."""
        for seq in [seq for seq in state.waiting if seq.order in self._waiting]:
            one = self._waiting[seq.order]
            if one.look_s > now_s:
                continue
            self.late += not one.late
            one.late, each_s = True, PATIENCE * one.slo_s
            one.look_s = one.late_s + ((now_s - one.late_s) // each_s + 1.0) * each_s
            self._place(state, seq, one.look_s + each_s)
        self._next_s = min([one.look_s for one in self._waiting.values()], default=inf)

    @staticmethod
    def _place(state: AdmissionState[S], seq: S, due_s: float) -> None:
        state.waiting.remove(seq)
        seq.due_s = due_s
        insert(state.waiting, seq)


def mechanisms_of(queues: Queues[S] | None, waiting: int) -> dict[str, Mechanism]:
    """{"queues": whether the order has turned on by itself, and why}; empty for orders that never do."""
    mechanism = queues.mechanism(waiting) if queues is not None else None
    return {"queues": mechanism} if mechanism is not None else {}


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
