"""A Triton driver without a GPU: kernels are compiled for sm_90, and a launch is noted instead of run. Tensors are the CPU's.

For programs of their own, which are not interpreted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Launched(NamedTuple):
    """A launch. `kernel` stands for its machine code; of the arguments, tensors are addresses and constants are left out."""

    name: str
    kernel: int
    grid: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]


class NullDriver:
    """Notes launches in `launched` while `notes` is set."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.notes, self.stream, self._kernels = True, 0, 0
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": 227 << 10})
        self.launcher_cls = self._launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def _load(self, *binary: Any) -> tuple[int, int, int, int, int]:
        self._kernels += 1
        return 0, self._kernels, 32, 0, 1024  # module, function, registers, spills, threads

    def _launcher(self, source: Any, metadata: Any) -> Any:
        kinds = list(source.signature.values())

        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            if self.notes:
                given = [arg.data_ptr() if hasattr(arg, "data_ptr") else arg for arg in rest[-len(kinds) :]]
                passed = tuple(value for value, kind in zip(given, kinds, strict=True) if kind != "constexpr")
                self.launched.append(Launched(metadata.name, function, (x, y, z), stream, passed))

        return launch


def install() -> NullDriver:
    """Make a new one Triton's driver in this process."""
    found = NullDriver()
    driver.set_active(found)
    return found
