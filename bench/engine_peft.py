"""transformers + PEFT as a contestant of the engine bench: static batches, mixed ones with `adapter_names`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from bench.engine_child import Generate, serve


def make(setup: dict[str, Any]) -> Generate:
    """A function that answers laps with PEFT and all adapters, everything in bf16.

    PEFT would keep adapters in float32, with twice the memory traffic.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(setup["threads"])
    base = AutoModelForCausalLM.from_pretrained(setup["model"], dtype=torch.bfloat16, attn_implementation="sdpa")
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = 0
    names = [f"lora-{i}" for i in range(len(setup["adapters"]))]
    options: dict[str, Any] = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
    model = PeftModel.from_pretrained(base, setup["adapters"][0], adapter_name=names[0], **options)
    for name, path in zip(names[1:], setup["adapters"][1:], strict=True):
        model.load_adapter(path, name, **options)
    model.eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], adapters: list[int], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        distinct = set(adapters)
        mixed = {"adapter_names": [names[number] for number in adapters]} if len(distinct) > 1 else {}
        if not mixed and distinct != {-1}:
            model.set_adapter(names[adapters[0]])
        with model.disable_adapter() if distinct == {-1} else nullcontext():
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **mixed
            )
        return [list(map(int, row)) for row in output[:, ids.shape[1] :]]

    return generate


if __name__ == "__main__":
    serve(make)
