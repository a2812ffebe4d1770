"""What Motet is compared with: scheduling policies, evictions, queues, merging and kernels of papers and of other systems.

Importing this package adds the names to Motet's tables, as any plug-in does (docs/extending.md):

    motet simulate --plugins bench.rivals --policy rank-aware --set eviction=lru
    motet up --demo --plugins bench.rivals --queues chameleon
"""

from __future__ import annotations

from bench.rivals import policies, rank_aware
from bench.rivals.evictions import KeepNothing, Lru, Score
from bench.rivals.queues import ShortestFirst, SizeQueues
from motet.policies.cluster.dispatch import POLICIES
from motet.policies.memory.eviction import EVICTIONS
from motet.policies.step.request_queues import QUEUES

__all__ = ["EVICTIONS", "POLICIES", "QUEUES"]

POLICIES.add("rank-aware", lambda: rank_aware.choose)
POLICIES.add("random", lambda: policies.random)
POLICIES.add("first-fit", lambda: policies.first_fit)
POLICIES.add("most-idle", lambda: policies.most_idle)
POLICIES.add("least-pending", lambda: policies.least_pending)
POLICIES.add("lora-affinity", lambda: policies.lora_affinity)
POLICIES.add("round-robin", policies.RoundRobin)

EVICTIONS.add("lru", lambda cost: Lru())
EVICTIONS.add("score", lambda cost: Score())
EVICTIONS.add("fair-share", lambda cost: Score(frequency=1 / 3, recency=1 / 3, size=1 / 3))
EVICTIONS.add("none", lambda cost: KeepNothing())

QUEUES.add("sjf", lambda **memory: ShortestFirst())
QUEUES.add("static", lambda **memory: SizeQueues(**memory, static=True, ahead=0.0))
QUEUES.add("chameleon", lambda **memory: SizeQueues(**memory))
