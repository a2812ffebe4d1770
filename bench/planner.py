"""`motet plan` measured: workers against the bound and against other planners, and what the twin finds of every plan.

    python -m bench planner [--runs DIR] [--part scenarios|what-if|models] [--quick]

*scenarios*: high, low and mixed rates and ranks of 100, 400 and 2,000 adapters (adapter-caching paper, section 8.4), on the
published calibrations of vLLM for Llama and Qwen and on CaraServe's A10. Each plan is made as `motet plan` makes it, then judged
by an hour with seeds that it has not seen. A rival's plan counts only if it is valid too.

*what-if*: 20 drawn workers with lengths of arXiv, Mooncake and Azure (from `--runs`'s parent folder), which no constant of the law
was chosen with: the multiple of the load at which the law says that they break, beside the twin's.

*models* (needs `--runs`): the law and the learned models beside published runs of vLLM (`bench.planner_models`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import planner_models, report
from bench.planner_scenarios import Scenario, scenarios
from motet.cli.plan_runs import processes
from motet.policies.plan.bound import bound
from motet.policies.plan.capacity import Limits, judge
from motet.policies.plan.fleet import CannotServe
from motet.policies.plan.rivals import RIVALS
from motet.twin.planning.check import Result, Run
from motet.twin.planning.kinds import Kind, NativeKind, Part, VllmKind
from motet.twin.planning.loads import Loads, Objective
from motet.twin.planning.planner import Goal, Made, Offer, Trial, make, offered, pack_by, tried
from motet.twin.profile import a10_llama2_7b
from motet.twin.vllm.published import published
from motet.twin.workload import Lengths
