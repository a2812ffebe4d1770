"""Promise: an engine is a file and a line in a table, and a worker imports no engine but its own."""

from __future__ import annotations

import subprocess
import sys
from pkgutil import resolve_name

import pytest
from msgspec.structs import replace

from motet.services.worker import config
from motet.services.worker.config import ENGINES, WorkerConfig
from motet.services.worker.service import WorkerService
from motet.shared.config import ConfigError, fields
from tests.services.worker.support_service import BASE, Mesh, Running, generate, latest
from tests.support import eventually


def test_the_option_takes_the_names_of_the_table_and_no_other() -> None:
    [option] = [one for one in fields(WorkerConfig) if one.name == "engine"]
    assert option.choices == tuple(ENGINES) and option.default in ENGINES
    with pytest.raises(ConfigError, match="--engine"):
        WorkerConfig.of(model="m", engine="abacus")


@pytest.mark.parametrize("path", ENGINES.values())
def test_every_engine_of_the_table_has_the_function_that_opens_it(path: str) -> None:
    assert callable(resolve_name(path))


async def test_a_new_engine_needs_one_file_and_its_line_in_the_table(bus, nats_url, checkpoint, monkeypatch) -> None:
    monkeypatch.setitem(config.ENGINES, "echo", "tests.services.worker.echo_engine:open_echo")
    plain = WorkerConfig.of(nats_url=nats_url, model=str(checkpoint), served_model_name=BASE)
    service = WorkerService(replace(plain, engine=replace(plain.engine, engine="echo")))
    worker = Running(service, Mesh(bus))
    await worker.mesh.listen(service.worker_id)
    await service.start()
    try:
        request = generate([1, 2, 3])
        await worker.accepted(request)
        assert (await worker.mesh.ended(request.request_id)).finish == "length"
        assert worker.mesh.tokens(request.request_id) == [1, 2, 3]
        await eventually(lambda: latest(worker).requests == [])
        assert latest(worker).limits.engine == "echo" and service.not_ready() == []
    finally:
        await service.stop()


@pytest.mark.parametrize("name", ENGINES)
def test_a_worker_imports_no_engine_but_its_own(name: str) -> None:
    code = (
        "import sys; from pkgutil import resolve_name; import motet.services.worker.service;"
        f"from motet.services.worker.config import ENGINES; resolve_name(ENGINES[{name!r}]);"
        "print([path for path in ENGINES.values() if path.partition(':')[0] in sys.modules], 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"{[ENGINES[name]]} False"
