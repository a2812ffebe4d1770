"""vLLM as a contestant of the engine bench. Runs in vLLM's own environment; `bench.vllm_peer` says how."""

from __future__ import annotations

from typing import Any

from bench.engine_child import Generate, serve


def make(setup: dict[str, Any]) -> Generate:
    """A function that answers laps with vLLM's offline engine.

    LoRA is on only if adapters are asked for: without it, vLLM compiles its model.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    paths = setup["adapters"]
    limits = {"max_num_batched_tokens": setup["step_tokens"]} if "step_tokens" in setup else {}
    lora = {"enable_lora": True, "max_loras": len(paths), "max_cpu_loras": len(paths), "max_lora_rank": setup["max_rank"]}
    llm = LLM(
        setup["model"],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **(limits | lora if paths else limits),
    )
    requests = [LoRARequest(f"lora-{i}", i + 1, path) for i, path in enumerate(paths)]

    def generate(prompts: list[list[int]], adapters: list[int], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            lora_request=[None if number < 0 else requests[number] for number in adapters] if paths else None,
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(make)
