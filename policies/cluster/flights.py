"""Flights: assignments that the workers' states do not show yet. A flight counts as load from the moment of the assignment.

The states of workers that a scheduler knows are slightly old. Without flights, a burst between two states would go to one
worker. A flight counts in `ClusterState` as a waiting request and ends

- when the worker's state shows the request in this epoch or a newer one (from then on the state counts);
- when the worker refuses (`withdraw`), or is removed;
- when the worker accepted it, but two snapshots or `in_flight_s` later no state has shown it: it began and ended in between.

Pure: the live scheduler and the twin's scheduler pass in what they receive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from motet.policies.cluster.cluster_state import ClusterState
from motet.shared.model import RequestBrief
from motet.shared.wire.prefixes import PrefixKeys

SNAPSHOTS_WITHOUT = 2  # one may have been sent before the worker accepted


@dataclass(slots=True)
class _Flight:
    brief: RequestBrief
    prefix_keys: tuple[PrefixKeys, ...] = ()
    accepted_s: float | None = None  # None: the worker has not answered
    snapshots_without: int = 0


class Flights:
    """The flights of one scheduler, kept beside its `state`. Workers' messages about requests are applied through it."""

    def __init__(self, state: ClusterState, in_flight_s: float) -> None:
        self._state, self._in_flight_s = state, in_flight_s
        self._flights: dict[str, dict[str, _Flight]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._flights.values()))

    def count(self, worker_id: str) -> int:
        """Flights to one worker."""
        return len(self._flights.get(worker_id, ()))

    # ---- assignments

    def expect(self, worker_id: str, brief: RequestBrief, now_s: float, prefix_keys: tuple[PrefixKeys, ...] = ()) -> None:
        """Count a request as waiting on a worker, before it is assigned. `prefix_keys`: of its prompt."""
        self._flights.setdefault(worker_id, {})[brief.request_id] = _Flight(brief, prefix_keys)
        self._state.put_request(worker_id, brief, now_s)
        self._state.expect_prefixes(worker_id, prefix_keys, now_s)

    def accepted(self, worker_id: str, request_id: str, now_s: float) -> None:
        """The worker accepted the request: its state will show it soon."""
        flight = self._flights.get(worker_id, {}).get(request_id)
        if flight is not None:
            flight.accepted_s = now_s

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """The worker did not accept the request."""
        flight = self._flights.get(worker_id, {}).pop(request_id, None)
        if flight is not None:
            self._state.drop_request(worker_id, request_id)
            self._state.disappoint_prefixes(worker_id, flight.prefix_keys)

    # ---- what workers say

    def snapshot(self, worker_id: str, briefs: Iterable[RequestBrief], now_s: float) -> None:
        """Take in a snapshot: all requests of the worker."""
        flights = self._flights.get(worker_id)
        if not flights:
            self._state.replace_requests(worker_id, briefs, now_s)
            return
        shown = {brief.request_id: brief for brief in briefs}
        for request_id, flight in list(flights.items()):
            if _shows(shown.get(request_id), flight):
                del flights[request_id]
            elif flight.accepted_s is not None:
                flight.snapshots_without += 1
                if flight.snapshots_without >= SNAPSHOTS_WITHOUT:
                    del flights[request_id]
        shown.update([(request_id, flight.brief) for request_id, flight in flights.items()])
        self._state.replace_requests(worker_id, shown.values(), now_s)

    def delta(
        self,
        worker_id: str,
        changed: Iterable[RequestBrief],
        removed: Iterable[str],
        now_s: float,
        running_left: int | None = None,
    ) -> None:
        """Take in a delta: new or changed requests, and ended ones. `running_left`: as in `ClusterState.change_requests`."""
        flights = self._flights.get(worker_id)
        if flights:
            news = []
            for brief in changed:
                flight = flights.get(brief.request_id)
                if flight is not None:
                    if not _shows(brief, flight):
                        continue
                    del flights[brief.request_id]
                    if brief == flight.brief:
                        continue  # the state counts it so already
                news.append(brief)
            changed = news
            for request_id in removed:
                flights.pop(request_id, None)
        self._state.change_requests(worker_id, changed, removed, now_s, running_left)

    def forget(self, worker_id: str) -> None:
        """Drop the flights of a worker that `state` has removed."""
        self._flights.pop(worker_id, None)

    def expire(self, now_s: float) -> None:
        """Drop flights that were accepted more than `in_flight_s` ago and that no state showed."""
        for worker_id, flights in self._flights.items():
            for request_id, flight in list(flights.items()):
                if flight.accepted_s is not None and now_s - flight.accepted_s > self._in_flight_s:
                    self.withdraw(worker_id, request_id)


def _shows(brief: RequestBrief | None, flight: _Flight) -> bool:
    """Whether the worker's message is about this assignment and not about an older epoch of the request."""
    return brief is not None and brief.epoch >= flight.brief.epoch
