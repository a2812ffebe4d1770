"""Sends a step's small arrays to a device. The host waits for nothing, as it would with a copy from ordinary memory."""

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
