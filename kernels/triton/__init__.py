"""The Triton kernels of batched multi-rank LoRA. `kernels` uses them when the pool is on a GPU.

device.py      the kernels
launch.py      their launches, without Triton's Python code from the second on
attention.py   paged attention
sampling.py    the next tokens
pointwise.py   norms, rotation and activation between a layer's products
batch.py       a step's work list, once per batch
lora.py        the plans, their launch constants, add_lora
"""

from motet.kernels.triton.lora import PLANS, LoraBatch, add_lora, plan_for, prepare, start_lora

__all__ = ["PLANS", "LoraBatch", "add_lora", "plan_for", "prepare", "start_lora"]
