"""Adapters on their way to a device whose steps are enqueued: the streams, and what orders them with CPU processes.

streams.py    a device's streams and words in host memory that they write and wait for
driver.py     those words through the CUDA driver
loading.py    copies beside the steps, layer by layer
assist.py     a step some of whose rows CPU processes compute

Nothing here makes the thread that enqueues a step wait for the device: who waits is a stream, for a word.
"""

from kernels.device.assist import AssistedStep, DeviceAssist
from kernels.device.loading import DeviceLoader
from kernels.device.streams import DeviceStreams, Mark, cuda_streams, host_streams, numbered

__all__ = ["AssistedStep", "DeviceAssist", "DeviceLoader", "DeviceStreams", "Mark", "cuda_streams", "host_streams", "numbered"]
