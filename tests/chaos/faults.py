"""The faults of a chaos run: one list per phase, in turn, and a seeded draw of the same faults at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tests.chaos.mesh import BUSIEST, ChaosMesh

FREEZE_S = 5.0
CUT_S = 3.0
AGAIN_S = 0.25  # from one death to the next: in the middle of the resumptions

WAVES = 4  # of moves, so that a request moves while its last move is under way

Kind = Literal["death", "frozen", "restart", "other"]


@dataclass(frozen=True)
class Fault:
    """One fault.

    `kind` names the promise to check: how soon the streams of a dead or a frozen worker are resumed, or that no request is
    refused during a restart.
    """

    name: str
    kind: Kind
    inject: Callable[[ChaosMesh], Awaitable[None]]


def kill(*targets: str) -> Fault:
    """SIGKILL to one process, or to several shortly after each other."""

    async def inject(mesh: ChaosMesh) -> None:
        async with asyncio.TaskGroup() as group:
            for target in targets:
                if target != targets[0]:
                    await asyncio.sleep(AGAIN_S)  # time: between two faults
                group.create_task(mesh.kill(target))

    alone = len(targets) == 1 and targets[0].startswith("worker")
    return Fault(f"kill {' then '.join(targets)}", "death" if alone else "other", inject)


def freeze(target: str) -> Fault:
    """SIGSTOP for `FREEZE_S`."""
    return Fault(f"freeze {target}", _kind(target), lambda mesh: mesh.freeze(target, FREEZE_S))


def cut(target: str) -> Fault:
    """Close a process's broker connections and refuse new ones for `CUT_S`."""
    return Fault(f"cut {target}", _kind(target), lambda mesh: mesh.cut(target, CUT_S))


def silence(target: str) -> Fault:
    """Let no byte pass for `FREEZE_S`, without closing a connection."""
    return Fault(f"silence {target}", _kind(target), lambda mesh: mesh.silence(target, FREEZE_S))


def cut_node(node: str) -> Fault:
    """Cut all clients of one broker off from it for `CUT_S`."""
    return Fault(f"cut {node} off its clients", "other", lambda mesh: mesh.cut_node(node, CUT_S))


def moves(*targets: str) -> Fault:
    """Move every request to another worker again and again; meanwhile `targets` are killed."""

    async def inject(mesh: ChaosMesh) -> None:
        async with asyncio.TaskGroup() as group:
            moving = group.create_task(mesh.move_requests(WAVES))
            for target in targets:
                await asyncio.sleep(2 * AGAIN_S)  # time: between two faults
                group.create_task(mesh.kill(target))
        assert moving.result(), "no request was there to be moved"

    return Fault(" and ".join(["moves", *(f"kill {target}" for target in targets)]), "other", inject)


def resize(leaves: str, *targets: str) -> Fault:
    """One worker more, one less, and back; meanwhile `targets` are killed."""

    async def inject(mesh: ChaosMesh) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(mesh.resize(leaves))
            for target in targets:
                await asyncio.sleep(8 * AGAIN_S)  # time: between two faults
                group.create_task(mesh.kill(target))

    return Fault(" and ".join([f"resize, {leaves} leaves", *(f"kill {target}" for target in targets)]), "other", inject)


RESTART = Fault("restart everything", "restart", ChaosMesh.restart)
RESTART_BESIDE_KILLS = Fault("restart everything beside kills", "other", lambda mesh: _restart_beside(mesh, EVERY))
UPGRADE = Fault("restart into this code", "restart", ChaosMesh.restart)


async def _restart_beside(mesh: ChaosMesh, targets: Iterable[str]) -> None:
    """A restart of everything must not fail because a process is killed meanwhile."""
    async with asyncio.TaskGroup() as group:
        group.create_task(mesh.restart())
        for target in targets:
            await asyncio.sleep(4 * AGAIN_S)  # time: between two faults
            group.create_task(mesh.kill(target))


def _kind(target: str) -> Kind:
    return "frozen" if target.startswith("worker") else "other"


EVERY = ("worker-1", "scheduler-1", "gateway-1", "registry", "predictor")

SINGLE = [
    kill("worker-1"),
    kill("scheduler-1"),
    kill("gateway-1"),
    kill("nats-1"),
    kill("registry"),
    kill("predictor"),
    freeze("worker-2"),
    freeze("scheduler-2"),
    freeze("gateway-2"),
    freeze("nats-1"),
    freeze("registry"),
    freeze("predictor"),
    kill("worker-2"),
    cut("worker-3"),
    *(cut(name) for name in ("scheduler-1", "gateway-1", "registry", "predictor")),
    silence("worker-1"),
    silence("gateway-2"),
    kill("worker-3", "worker-1"),
    kill("worker-2", "scheduler-2"),
    kill("worker-3"),
    moves(),
    moves("worker-1", "scheduler-1"),
    resize("worker-2"),
    resize("worker-1", "scheduler-1", "nats-1"),
    RESTART,
    RESTART_BESIDE_KILLS,
]

CLUSTER = [
    kill("nats-2"),
    freeze("nats-3"),
    cut_node("nats-1"),
    kill("nats-1"),
    kill("worker-1"),
    silence("worker-2"),
    kill("gateway-1"),
]

QUICK = [kill("worker-1"), kill("scheduler-1"), freeze("worker-2"), kill("nats-1"), moves("worker-1")]

PICTURES = [  # twenty
    kill(BUSIEST),
    kill("scheduler-1"),
    freeze(BUSIEST),
    kill("nats-1"),
    kill("gateway-1"),
    moves(),
    kill(BUSIEST),
    freeze("gateway-2"),
    kill("registry"),
    freeze("scheduler-2"),
    freeze("nats-1"),
    kill(BUSIEST, BUSIEST),
    cut("worker-1"),
    freeze(BUSIEST),
    silence("worker-3"),
    kill(BUSIEST, "scheduler-2"),
    cut("gateway-1"),
    moves(BUSIEST),
    kill(BUSIEST),
    RESTART,
]
PICTURES_QUICK = [kill(BUSIEST), freeze(BUSIEST), kill("nats-1"), moves(BUSIEST)]


def at_random(count: int, seed: int, *, nodes: int) -> list[Fault]:
    """`count` faults, some of them two at once."""
    draw = random.Random(seed)
    targets = [*EVERY, "worker-2", "worker-3", "gateway-2", "scheduler-2", *(f"nats-{i + 1}" for i in range(nodes))]
    faults = []
    for _ in range(count):
        one, two = draw.sample(targets, 2)
        how = draw.choice(["kill", "kill", "freeze", "cut", "silence", "twice"])
        if how == "twice":
            faults.append(kill(one, two))
        elif how == "freeze" or (how == "silence" and one.startswith("nats")):
            faults.append(freeze(one))
        elif how == "kill" or one.startswith("nats"):
            faults.append(kill(one))
        else:
            faults.append({"cut": cut, "silence": silence}[how](one))
    return faults
