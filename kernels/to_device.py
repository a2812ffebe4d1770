"""Sends a step's small arrays to a device, and fetches its results. The host waits in `fetch` alone.

All copies are from and to pinned memory. With ordinary memory the driver would wait inside the call that copies.
"""

from __future__ import annotations

import numpy as np
import torch


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on the device; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def fill(tensor: torch.Tensor, array: np.ndarray) -> None:
    """Copy `array` into `tensor`, which has its shape. The copy comes before later work of the current stream."""
    host = torch.empty(array.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)  # the caching allocator's
    host.numpy()[...] = array
    tensor.copy_(host, non_blocking=True)


def fetch(tensor: torch.Tensor) -> np.ndarray:
    """`tensor` on the host; waits for the current stream. Other threads can use the driver meanwhile."""
    if not tensor.is_cuda:
        return tensor.numpy()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # the caching allocator's
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host.numpy()
