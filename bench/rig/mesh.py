"""A whole mesh on free ports: every service its own process, as `motet up` starts them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.rig.processes import cpu_s
from motet.cli.stack import Stack, StackFacts, StackOptions, read_facts
from motet.examples.demo import BASE as DEMO_BASE
from motet.examples.demo import DEMO

DRAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Mesh:
    """A running mesh. `port`: of its gateway; `data_dir`: of the stack.

    `replace(variables, *services)` replaces services of these names by new ones with further MOTET_* variables.
    """

    port: int
    data_dir: Path
    replace: Callable[..., None]

    @property
    def url(self) -> str:
        """The gateway's."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def facts(self) -> StackFacts:
        """Process ids and addresses of the services."""
        facts = read_facts(self.data_dir)
        assert facts is not None, "the stack has started"
        return facts

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of each kind of process of the mesh, and of this one, the client."""
        used: dict[str, float] = {"client": time.process_time()}
        for name, service in self.facts.services.items():
            kind = name.split("-")[0]
            used[kind] = used.get(kind, 0.0) + cpu_s(service["pid"])
        return used


@contextmanager
def started_mesh(options: StackOptions, variables: Mapping[str, str] = {}, *, module: str = "motet") -> Iterator[Mesh]:
    """A context with a stack that is ready.

    `variables`: MOTET_* variables of its services. `module`: what Python runs as each of them.
    """
    before = dict(os.environ)
    os.environ |= variables  # the services take what no flag says from their environment
    stack = Stack(options, _Failures(), program=(sys.executable, "-m", module))
    with asyncio.Runner() as runner:

        def replace(more: Mapping[str, str], *services: str) -> None:
            os.environ.update(more)
            runner.run(stack.replace(*services))

        try:
            runner.run(stack.start())
            yield Mesh(int(stack.urls[0].rsplit(":", 1)[1]), options.data_dir, replace)
        finally:
            os.environ.clear()
            os.environ.update(before)
            runner.run(stack.stop())


@contextmanager
def demo_mesh(
    variables: Mapping[str, str],
    keys: str,
    *,
    workers: int = 1,
    module: str = "motet",
    adapters: Path = DEMO / "adapters",
) -> Iterator[Mesh]:
    """A context with a mesh of the demo model. `keys`: lines of its key file; `adapters`: the directory of its adapters."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as directory:
        key_file = Path(directory) / "keys"
        key_file.write_text(keys)
        options = StackOptions(
            model=str(DEMO / "model"),
            served_model_name=DEMO_BASE,
            adapters_dir=str(adapters),
            data_dir=Path(directory) / "data",
            workers=workers,
            api_keys_file=str(key_file),
            threads=1,
            port=0,
            drain_s=DRAIN_S,
        )
        with started_mesh(options, variables, module=module) as running:
            yield running


class _Failures:
    """Receives state changes of the stack's services and reports failures only."""

    def changed(self, name: str, state: str, note: str) -> None:
        if state in ("restarting", "failed"):
            print(f"{name}: {state} {note}")
