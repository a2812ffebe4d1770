"""Compiled kernels for the CPU: packed-weight products, paged attention, multi-rank LoRA, and a whole step in one call.

    src/simd.h        vectors of one instruction set        src/team.h      threads that run one function together
    src/gemm.h        weights packed once, panels           src/lora.h      shrink and expand over pages
    src/gemm_integers.h  weights of 8 and 4 bits            src/gemm_items.h  a product in pieces
    src/attention.h   decode and chunked prefill            src/forward.h   the step
    src/loader.h      adapters copied beside the steps      src/channel.h   memory shared with a CPU LoRA process
    src/merge.h       an adapter added to packed weights    merging.py      copies made piece by piece
    src/site_lora.h   LoRA of image models                  sites.py        its batches and calls
    src/assist.h      steps beside adapter copies           src/assist_server.h  the CPU LoRA process
    build.py          compiles with the system's compiler   library.py      ctypes
    packing.py        weights, packed or mapped             forward.py      the interface for the engine
    loading.py, assist.py  its helpers

Importing this package compiles nothing. The first CpuEngine of an instruction set compiles its library, once per machine.
"""

from motet.kernels.cpu.build import ISAS, BuildError, available_isas
from motet.kernels.cpu.forward import CpuForward
from motet.kernels.cpu.library import INTEGERS, CpuEngine, Packed
from motet.kernels.cpu.packing import Arena, MappedArena, Packer

__all__ = [
    "INTEGERS",
    "ISAS",
    "Arena",
    "BuildError",
    "CpuEngine",
    "CpuForward",
    "MappedArena",
    "Packed",
    "Packer",
    "available_isas",
]
