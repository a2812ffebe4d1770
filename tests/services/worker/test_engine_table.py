"""Promise: engines are a table, and a worker imports no engine but its own (tests/e2e/test_plugin.py adds one)."""

from __future__ import annotations

import subprocess
import sys
from pkgutil import resolve_name

import pytest

from motet.services.worker.config import ENGINES, WorkerConfig
from motet.shared.config import ConfigError, fields


def test_the_option_takes_the_names_of_the_table_and_no_other() -> None:
    [option] = [one for one in fields(WorkerConfig) if one.name == "engine"]
    assert option.choices == tuple(ENGINES) and option.default in ENGINES
    with pytest.raises(ConfigError, match="--engine"):
        WorkerConfig.of(model="m", engine="abacus")


@pytest.mark.parametrize("path", ENGINES.values())
def test_every_engine_of_the_table_has_the_function_that_opens_it(path: str) -> None:
    assert callable(resolve_name(path))


@pytest.mark.parametrize("name", ENGINES)
def test_a_worker_imports_no_engine_but_its_own(name: str) -> None:
    code = (
        "import sys; from pkgutil import resolve_name; import motet.services.worker.service;"
        f"from motet.services.worker.config import ENGINES; resolve_name(ENGINES[{name!r}]);"
        "print([path for path in ENGINES.values() if path.partition(':')[0] in sys.modules], 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"{[ENGINES[name]]} False"
