"""Copies adapters to a GPU beside its steps, while CPU LoRA processes compute the missing layers.

streams.py           a device's streams, and 32-bit words (numbers) in host memory that they write and wait for
driver.py            the CUDA driver's functions for words and copies
virtual_memory.py    physical pages and address ranges of the CUDA driver
loading.py           copies beside the steps, layer by layer, by a compiled thread
assist.py            a step in which CPU LoRA processes compute some rows

The thread that enqueues a step never waits for the device: only streams wait, for words.
"""

from motet.kernels.device.assist import AssistedStep, DeviceAssist
from motet.kernels.device.loading import DeviceLoader
from motet.kernels.device.streams import DeviceStreams, Mark, cuda_streams, host_streams, numbered

__all__ = ["AssistedStep", "DeviceAssist", "DeviceLoader", "DeviceStreams", "Mark", "cuda_streams", "host_streams", "numbered"]
