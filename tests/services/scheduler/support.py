"""What tests ask of a scheduler."""

from __future__ import annotations

from motet.services.scheduler.service import SchedulerService
from motet.shared import subjects
from motet.shared.bus import Bus
from motet.shared.errors import MotetError, from_info
from motet.shared.telemetry import REGISTRY
from motet.shared.wire.refusal import Refused
from motet.shared.wire.request import Assigned, SubmitReply
from tests.support import eventually


async def submit(bus: Bus, request) -> Assigned | MotetError:
    reply = await bus.request(subjects.SUBMIT, request, SubmitReply, timeout_s=10.0)
    return from_info(reply.error) if isinstance(reply, Refused) else reply


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"motet_scheduler_{name}_total", labels) or 0.0


async def knows(service: SchedulerService, *worker_ids: str) -> None:
    await eventually(lambda: all(map(service.cluster.knows, worker_ids)))
