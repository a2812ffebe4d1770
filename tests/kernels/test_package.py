"""In a clone, transformers finds the folder `kernels` when it looks for the hub package of that name. It must not use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBE = """
import sys
import kernels
assert kernels.__file__ == sys.argv[1], kernels.__file__
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
assert not is_kernels_available()
config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(config)
assert model(input_ids=__import__("torch").tensor([[1, 2]])).logits.shape == (1, 2, 8)
print("fine")
"""


def test_transformers_does_not_take_our_package_for_the_hub_package() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(ROOT / "kernels/__init__.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_triton_is_not_imported_for_a_pool_on_a_cpu() -> None:
    probe = (
        "import sys, torch, numpy as np\n"
        "from motet import kernels\n"
        "shapes = {m: (8, 8) for g in kernels.GROUPS.values() for m in g}\n"
        "pool = kernels.LoraPool(shapes, layers=1, slots=1, max_rank=8, bytes_total=1 << 16, dtype=torch.float32)\n"
        "kernels.LoraBatch.build(pool, np.array([-1], dtype=np.int32))\n"
        "print('motet.kernels.triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "False", done.stderr
