"""Launches of a Triton kernel by the machine code of its first launch.

    first launch of a kind    kernel[grid](...): Triton binds, specializes and compiles, in 15 to 20 us once it has compiled
    later ones                CompiledKernel[grid](...) with addresses and numbers

Two launches are of a kind when Triton would run the same machine code for both. Triton specializes on what `_Kind` lists, and a
kernel's `do_not_specialize` only makes that coarser, so a kind of its own is at worst a launch that Triton looks up itself.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
from triton.runtime import driver

INTERPRETED = bool(triton.knobs.runtime.interpret)

_Kind = tuple[Any, ...]
"""Device; then of each argument: a tensor's type and whether its address is a multiple of 16; whether an int is 1, is a
multiple of 16, and what lies beyond its 32 bits; that it is a float or None."""


class Kernel:
    """A kernel with all of its constants and options, which are `constants`. They come last in its signature."""

    __slots__ = ("_compiled", "_constants", "_tail", "kernel")

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel, self._constants = kernel, constants
        self._tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: dict[_Kind, Any] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, stream: torch.cuda.Stream | None = None) -> None:
        """Launch on `stream`, or the current one.

        Arguments are tensors of one device, of which the first is one, ints, floats and None.
        """
        if INTERPRETED:
            self.kernel[grid](*args, **self._constants)
            return
        device = args[0].get_device()
        values, kind = list(args), [device]
        for at, arg in enumerate(args):
            if type(arg) is int:
                kind.append((arg == 1) + 2 * (arg & 15 == 0) + ((arg + (1 << 31)) >> 32 << 2))
            elif arg is None or type(arg) is float:
                kind.append(type(arg))
            else:
                values[at] = address = arg.data_ptr()
                kind += (arg.dtype, address & 15 == 0)
        compiled = self._compiled.get(key := tuple(kind))
        if compiled is None:
            self._first(key, grid, args, stream)
            return
        raw = driver.active.get_current_stream(device) if stream is None else stream.cuda_stream
        compiled[(*grid, 1, 1)](*values, *self._tail, stream=raw)

    def _first(self, kind: _Kind, grid: tuple[int, ...], args: tuple[Any, ...], stream: torch.cuda.Stream | None) -> None:
        """Launch by Triton, and keep what it compiled if that can be launched with all the kernel's arguments in order."""
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            compiled = self.kernel[grid](*args, **self._constants)
        if hasattr(compiled, "packed_metadata") and len(args) + len(self._tail) == len(self.kernel.arg_names):
            self._compiled[kind] = compiled
