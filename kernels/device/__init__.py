"""Copies of adapters to a GPU beside its steps, and CPU processes that compute meanwhile.

streams.py    a device's streams, and 32-bit words in host memory that they write and wait for
driver.py     these words through the CUDA driver
loading.py    copies beside the steps, layer by layer
assist.py     a step in which CPU processes compute some rows

The thread that enqueues a step never waits for the device: only streams wait, for words.
"""

from motet.kernels.device.assist import AssistedStep, DeviceAssist
from motet.kernels.device.loading import DeviceLoader
from motet.kernels.device.streams import DeviceStreams, Mark, cuda_streams, host_streams, numbered

__all__ = ["AssistedStep", "DeviceAssist", "DeviceLoader", "DeviceStreams", "Mark", "cuda_streams", "host_streams", "numbered"]
