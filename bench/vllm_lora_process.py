"""vLLM with LoRA in a process of its own, with or without Motet's plug-in: it answers one set-up and ends.

stdin    {"model", "adapters": [directory, ..], "options": of LLM, "laps": [lap, ..]}
file     the last argument: {"laps": [result, ..], "wrapper", "slot_bytes", "all_slots_bytes"} as JSON

lap      {"ask": [[prompt, adapter or -1], ..], "tokens": n}: all at once; the result is the tokens of each
         {"churn": [[prompt, adapter or -1], ..], "tokens": n}: one more request every second step, adapters removed meanwhile
         {"replace": [adapter, other]}: the name of an adapter has other files from now on
         {"remove": [adapter, ..]}
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


class Running:
    """An engine with numbered adapters."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.paths = list(setup["adapters"])
        self.llm = LLM(setup["model"], enable_lora=True, disable_log_stats=True, skip_tokenizer_init=True, **setup["options"])
        self.asked = 0

    def request(self, number: int, **more: Any) -> LoRARequest | None:
        return None if number < 0 else LoRARequest(f"lora-{number}", number + 1, self.paths[number], **more)

    def lap(self, lap: dict[str, Any]) -> Any:
        engine = self.llm.llm_engine
        if "ask" in lap:
            return self.ask(lap["ask"], lap["tokens"])
        if "churn" in lap:
            return self.churn(lap["churn"], lap["tokens"])
        if "replace" in lap:
            number, other = lap["replace"]
            self.paths[number] = self.paths[other]
            return engine.add_lora(self.request(number, load_inplace=True))
        return [engine.remove_lora(number + 1) for number in lap["remove"]]

    def ask(self, asked: list[Any], tokens: int) -> list[list[int]]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in asked],
            _sampling(tokens),
            lora_request=[self.request(number) for _, number in asked],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def churn(self, asked: list[Any], tokens: int) -> list[list[int]]:
        engine, left = self.llm.llm_engine, list(enumerate(asked))
        done: dict[int, list[int]] = {}
        steps = 0
        while left or engine.has_unfinished_requests():
            if left and steps % 2 == 0:
                number, (prompt, adapter) = left.pop(0)
                engine.add_request(
                    f"churn-{self.asked}-{number}",
                    {"prompt_token_ids": prompt},
                    _sampling(tokens),
                    lora_request=self.request(adapter),
                )
            if steps % 7 == 6:
                for one in set(engine.list_loras()) - {adapter + 1 for _, adapter in asked[-len(left) - 6 :]}:
                    engine.remove_lora(one)
            for output in engine.step():
                if output.finished:
                    done[int(output.request_id.split("-")[2])] = list(output.outputs[0].token_ids)
            steps += 1
        self.asked += 1
        return [done[number] for number in range(len(asked))]


def slot_bytes(manager: Any) -> tuple[int, int]:
    """Bytes that the slots take, and that they would take if vLLM allocated all of them at once, as it does by itself."""
    held = padded = 0
    for layer in manager.modules.values():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(layer, name)
            for one in [stacked] if isinstance(stacked, torch.Tensor) else stacked:
                padded += one.numel() * one.element_size()
                held += 0 if one.is_meta else one.numel() * one.element_size()
        kept = layer.__dict__.get("motet_lora")
        held += kept.nbytes if kept is not None else 0
    return held, padded


def _sampling(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def main() -> None:
    """Answer one set-up."""
    setup = json.loads(sys.stdin.readline())
    running = Running(setup)
    laps = [running.lap(lap) for lap in setup["laps"]]
    manager = running.llm.collective_rpc(lambda worker: worker.model_runner.lora_manager._adapter_manager)[0]
    wrapper = type(next(iter(manager.punica_wrapper_mapping.values()))).__name__
    held, padded = slot_bytes(manager)
    found = {"laps": laps, "wrapper": wrapper, "slot_bytes": held, "all_slots_bytes": padded}
    Path(sys.argv[-1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
