"""Moves requests from workers with long queues to others (`policies.cluster.rebalance`).

    ClusterState ─> questions ─> plans (in a thread) ─> Move to the gateways ─> the owner submits it again, `move_to` first

Of several schedulers one plans (`planner`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import get_args

from motet.policies.cluster.migration_plan import Plan
from motet.policies.cluster.rebalance import Asked, Rebalancing
from motet.services.scheduler import metrics
from motet.services.scheduler.cluster import WatchedCluster
from motet.services.scheduler.planner import Planner
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.clock import now_s
from motet.shared.errors import MotetError, Unavailable
from motet.shared.model import Mechanism, MechanismState
from motet.shared.telemetry import logger
from motet.shared.wire.admin import MoveStatus, PlanStatus
from motet.shared.wire.request import Move

log = logger("motet.scheduler.rebalancer")
LOOK_S = 0.25


class Rebalancer:
    """Plans moves of requests. Of several schedulers only the one with the role acts.

    `mean_tokens`: the average output length.
    """

    def __init__(
        self,
        bus: Bus,
        cluster: WatchedCluster,
        mean_tokens: Callable[[], float],
        *,
        planner: Planner,
        stale_s: float,
        policy: Rebalancing,
    ) -> None:
        self._bus, self._cluster, self._mean_tokens = bus, cluster, mean_tokens
        self._planner, self._stale_s, self._policy = planner, stale_s, policy

    @property
    def mechanism(self) -> Mechanism:
        """Whether requests move, and why, for people."""
        return self._policy.mechanism(now_s()) if self._planner.mine else Mechanism("off", "another scheduler moves requests")

    async def run(self) -> None:
        """Check the cluster every `LOOK_S` seconds. Never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self._planner.mine:
                    await self._move()
            except (MotetError, TimeoutError) as error:
                log.warning("no plan", extra={"error": repr(error)})
            state = self.mechanism.state
            for one in get_args(MechanismState):
                metrics.MECHANISM.labels("rebalance", one).set(state == one)

    async def dry_run(self) -> list[PlanStatus]:
        """The plan for the present state, whatever the triggers say and whichever scheduler has the role."""
        return [_shown(question, await self._answer(question)) for question in self._questions(always=True)]

    def _questions(self, *, always: bool = False) -> Sequence[Asked]:
        return self._policy.questions(
            self._cluster.state, now_s(), stale_s=self._stale_s, avg_resp_len=self._mean_tokens(), always=always
        )

    async def _answer(self, question: Asked) -> Plan:
        """The plan, made in a thread, so that the event loop continues."""
        began_s = now_s()
        plan = await asyncio.to_thread(question.answer, self._policy.config.plan)
        metrics.PLAN_S.observe(now_s() - began_s)
        return plan

    async def _move(self) -> None:
        for question in self._questions():
            plan = await self._answer(question)
            self._policy.moved([plan], now_s())
            metrics.PLANS.labels("moves" if plan.moves else "in_vain").inc()
            if not plan.moves:
                continue
            pressure = question.pressure
            log.info(
                "moving",
                extra={
                    "base_model": question.base_model,
                    "requests": len(plan.moves),
                    "wait_ms": round(pressure.most_ms),
                    "least_ms": round(pressure.least_ms),
                    "late": pressure.late,
                    "gain": round(1.0 - plan.after_ms / plan.before_ms, 3),
                },
            )
            for move in self.messages(plan):
                try:
                    await self._bus.publish(subjects.MOVE, move)
                except Unavailable:
                    return
                metrics.MOVES.inc()

    def messages(self, plan: Plan) -> list[Move]:
        """What gateways are told of the plan."""
        state = self._cluster.state
        found = []
        for move in plan.moves:
            brief = state.requests(move.source).get(move.request_id) if move.source in state else None
            if brief is not None:  # it has not ended meanwhile
                known = move.to in state
                kv = known and self._policy.travels(state, move.request_id, move.source, move.to)
                found.append(Move(request_id=move.request_id, epoch=brief.epoch, to=move.to, kv=kv))
        return found


def _shown(question: Asked, plan: Plan) -> PlanStatus:
    pressure = question.pressure
    return PlanStatus(
        base_model=question.base_model,
        most_wait_ms=round(pressure.most_ms, 1),
        least_wait_ms=round(pressure.least_ms, 1),
        late_workers=pressure.late,
        before_ms=round(plan.before_ms, 1),
        after_ms=round(plan.after_ms, 1),
        moves=[MoveStatus(request_id=m.request_id, adapter=m.adapter, source=m.source, to=m.to) for m in plan.moves],
    )
