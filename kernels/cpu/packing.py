"""Weights in the layout that the compiled kernels read (src/packing.h), and the memory that they are in."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from motet.kernels.cpu.library import INTEGERS, TYPES, CpuEngine, Matrix, Packed, address
from motet.kernels.quantized import QuantizedMatrix

I4_SHIFTED, I8_GROUPED = 5, 6
"""4 and 8 bits with a scale and a zero point per output and 32 inputs, as some checkpoints have them."""

PANEL = 16
"""Outputs that are packed together."""

MAX_FAN_IN = 1 << 16
"""Largest number of inputs of an integer matrix, whose 8-bit products are added in 32 bits."""


class Arena:
    """Memory in huge pages for packed weights. Pieces are handed out one by one, and all are freed together with this object.

    `save` writes all pieces to a file. An arena of such a file (`MappedArena`) hands out the same pieces in the same order.
    """

    CHUNK_BYTES = 64 << 20  # what is not given out is never touched, so it costs nothing
    ALIGN = 64
    filled = False
    """Whether pieces have their content already, and must not be written."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunks: list[tuple[int, int, int]] = []  # address, bytes, bytes given out
        self._next = self._end = 0

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` bytes, zeroed unless `filled`."""
        at = -(-self._next // self.ALIGN) * self.ALIGN
        if at + nbytes > self._end:
            size = -(-max(nbytes, self.CHUNK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
            at = self.chunk(size)
            self._chunks.append((at, size, 0))
            self._end = at + size
        self._next = at + nbytes
        start, size, _ = self._chunks[-1]
        self._chunks[-1] = start, size, self._next - start
        return at

    def save(self, path: Path) -> None:
        """Write the arena to a file at once. Unused parts become holes. Raises OSError."""
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                begin = 0
                for at, size, used in self._chunks:
                    file.seek(begin)
                    file.write((ctypes.c_char * used).from_address(at))
                    begin += size
                file.truncate(begin)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)  # at once: other processes may be doing the same
        finally:
            part.unlink(missing_ok=True)

    def chunk(self, size: int) -> int:
        at: int | None = self._library.motet_alloc(size)
        if not at:
            raise MemoryError(f"{size} bytes for packed weights")
        return at

    def __del__(self) -> None:
        for at, size, _ in self._chunks:
            self._library.motet_release(at, size)
        self._chunks = []


class MappedArena(Arena):
    """The pieces of a file that `Arena.save` wrote, mapped into memory. Processes that map the same file share its pages.

    Raises OSError. Taking more than the file contains raises ValueError, because the file then belongs to other weights.
    """

    filled = True

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        super().__init__(library)
        self._path = path
        with path.open("rb") as file:
            populate = getattr(mmap, "MAP_POPULATE", 0)  # one call instead of a fault for every few pages
            self._file = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | populate, prot=mmap.PROT_READ)
        self._left = np.frombuffer(self._file, np.uint8)

    def chunk(self, size: int) -> int:
        if size > len(self._left):
            raise ValueError(f"{self._path} has not all of the packed weights; remove it")
        at: int = self._left.ctypes.data
        self._left = self._left[size:]
        return at

    def __del__(self) -> None:
        pass  # the mapping ends with its object


class Packer:
    """Turns weights [n, k] with bias [n] into packed matrices, of their own type or of integers (INTEGERS).

    The matrices are in `arena`, by default a new one. In an arena that is filled they are packed already.
    """

    def __init__(self, engine: CpuEngine, integers: str | None = None, arena: Arena | None = None) -> None:
        self._engine, self._kind = engine, INTEGERS[integers] if integers else None
        self._arena = arena or Arena(engine.library)

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Packed:
        return self.parts([weight], bias)

    def parts(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None) -> Packed:
        """A packed matrix from several matrices, one below the other."""
        n, k, of = sum(len(part) for part in parts), parts[0].shape[1], TYPES[parts[0].dtype]
        kind = of if self._kind is None else self._kind
        packed = self._room(n, k, kind, bias)
        if self._arena.filled:
            return packed
        if any(len(part) % PANEL for part in parts[:-1]):
            parts = [torch.cat(list(parts))]
        library, data, scale = self._engine.library, packed.matrix.data, packed.matrix.scale
        for part in parts:
            library.motet_pack(self._engine.handle, address(part), of, len(part), k, kind, data, scale)
            data += library.motet_packed_bytes(len(part), k, kind)
            scale = scale and scale + 4 * len(part)
        return packed

    def whole(self, weight: QuantizedMatrix, bias: torch.Tensor | None = None) -> Packed:
        """A packed matrix of integers: the values stay as they are, and the scales of groups become float16."""
        n, k = weight.values.shape
        zeros = weight.zeros
        per_output = weight.bits == 8 and weight.per_output and zeros is None
        if weight.bits == 8 and not per_output and zeros is None:
            zeros = torch.full_like(weight.scales, weight.middle)
        int4 = INTEGERS["int4"] if zeros is None else I4_SHIFTED
        kind = INTEGERS["int8"] if per_output else I8_GROUPED if weight.bits == 8 else int4
        packed = self._room(n, k, kind, bias)
        if self._arena.filled:
            return packed
        values = weight.values.contiguous()
        groups = None
        if per_output:
            scales = weight.scales.float().contiguous()
            ctypes.memmove(packed.matrix.scale, address(scales), n * 4)
        else:
            groups = weight.per_group(weight.scales)
            zeros = None if zeros is None else weight.per_group(zeros)
        self._engine.library.motet_pack_whole(
            self._engine.handle,
            address(values),
            None if groups is None else address(groups),
            None if zeros is None else address(zeros),
            n,
            k,
            packed.matrix.type,
            packed.matrix.data,
        )
        return packed

    def _room(self, n: int, k: int, kind: int, bias: torch.Tensor | None) -> Packed:
        """A packed matrix without content."""
        if kind == INTEGERS["int8"] and k > MAX_FAN_IN:
            raise ValueError(f"a matrix of {k} inputs: integer sums overflow above {MAX_FAN_IN}")
        data = self._arena.take(self._engine.library.motet_packed_bytes(n, k, kind))
        scale = self._arena.take(n * 4) if kind == INTEGERS["int8"] else None
        floats = None if bias is None else bias.float().contiguous()
        matrix = Matrix(data, scale, None if floats is None else floats.data_ptr(), n, k, kind)
        return Packed(matrix, (self._arena, floats))
