"""llama.cpp as a contestant of the engine bench, by its batch calls. Runs in an environment of its own (bench.llama_peer)."""

from __future__ import annotations

import ctypes
from typing import Any

from bench.engine_child import Generate, serve

MAX_REQUESTS, MAX_TOKENS = 32, 8192


def make(setup: dict[str, Any]) -> Generate:
    """A function that answers laps with the model in `setup["file"]`: one sequence per request, greedy.

    Either all requests of a lap have `setup["adapter"]`, or none.
    """
    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(setup["file"].encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp does not load {setup['file']}")
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_seq_max = MAX_TOKENS, 2048, MAX_REQUESTS
    options.n_threads = options.n_threads_batch = setup["threads"]
    context = llama.llama_init_from_model(model, options)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    adapter = llama.llama_adapter_lora_init(model, setup["adapter"].encode())
    if not adapter:
        raise RuntimeError(f"llama.cpp does not load {setup['adapter']}")
    batch = llama.llama_batch_init(options.n_batch, 0, 1)
    memory = llama.llama_get_memory(context)

    def put(token: int, position: int, sequence: int, wanted: bool) -> None:
        i = batch.n_tokens
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.n_tokens = i + 1

    def best(i: int) -> int:
        logits = llama.llama_get_logits_ith(context, i)
        return int(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (vocabulary,)).argmax())

    def step() -> None:
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama.cpp did not compute a step")

    def generate(prompts: list[list[int]], adapters: list[int], tokens: int) -> list[list[int]]:
        if len(set(adapters)) > 1:
            raise ValueError("a batch of llama.cpp has one adapter or none")
        chosen = [] if adapters[0] < 0 else [adapter]
        those, scales = (llama.llama_adapter_lora_p_ctypes * 1)(*chosen), (ctypes.c_float * 1)(1.0)
        if llama.llama_set_adapters_lora(context, those, len(chosen), scales):
            raise RuntimeError("llama.cpp did not take the adapter")
        llama.llama_memory_clear(memory, False)
        outputs: list[list[int]] = [[] for _ in prompts]
        batch.n_tokens, ends = 0, []
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                put(token, position, sequence, position == len(prompt) - 1)
            ends.append(batch.n_tokens - 1)
        step()
        for number in range(tokens):
            for sequence, end in enumerate(ends):
                outputs[sequence].append(best(end))
            if number == tokens - 1:
                break
            batch.n_tokens = 0
            for sequence, prompt in enumerate(prompts):
                put(outputs[sequence][-1], len(prompt) + number, sequence, True)
            ends = list(range(len(prompts)))
            step()
        return outputs

    return generate


if __name__ == "__main__":
    serve(make)
