"""The compiled kernels' engine, a stand-in for the CUDA driver, and interpreted kernels that are quicker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from motet.kernels.cpu import CpuEngine
from tests.kernels.support_cpu import ISAS
from tests.kernels.support_driver import Driver
from tests.support_triton import replace_once_per_launch

replace_once_per_launch()


@pytest.fixture(scope="module", params=ISAS)
def engine(request: pytest.FixtureRequest) -> Iterator[CpuEngine]:
    """One for each instruction set, with two threads."""
    yield CpuEngine(threads=2, isa=request.param)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """A stand-in for the CUDA driver."""
    return Driver.build(tmp_path_factory.mktemp("driver"))
