"""`bench.vllm_lora_process` with a wrong kernel: Motet's kernels forget the last output of every row."""

from __future__ import annotations

from typing import Any

import torch

from bench.vllm_lora_process import main


def plant_a_wrong_kernel() -> None:
    from motet.kernels.vllm import check

    right = check.add_layer_lora

    def wrong(y: torch.Tensor, *others: Any) -> None:
        last = y[:, -1].clone()
        right(y, *others)
        y[:, -1] = last

    check.add_layer_lora = wrong


if __name__ == "__main__":
    plant_a_wrong_kernel()
    main()
