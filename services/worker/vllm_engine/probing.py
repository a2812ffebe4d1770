"""Reads what an adapter in a slot of vLLM's is: norms of its matrices, and the answers to the probe's prompt.

The prompt is a request in vLLM's own queue, sent before those of the adapter, which run beside it; the worker holds back what
they answer. It wants log-probabilities of its prompt, so vLLM reads no cached blocks for it, and its salt is its own, so no
other request finds its blocks.

vLLM is imported in functions, because a worker with the native engine runs without it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from motet.policies.worker.probe import Account, Reading, blank, prompt
from motet.services.worker.vllm_engine.core import Core
from motet.shared.clock import now_s

PROBE = "probe/"
"""The beginning of a probe's id at vLLM."""
NOTHING = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class _Asked:
    """A probe under way. `norms` come by a command's answer, `answers` by the core's output."""

    digest: str
    began_s: float
    norms: Any = None
    told: bool = False  # `norms` are there
    answers: np.ndarray | None = None


@dataclass(slots=True, eq=False)
class CoreProbes:
    """The probes of one vLLM engine. `take` and `norms` return a reading when they have its last part."""

    base: np.ndarray = field(default_factory=lambda: NOTHING)
    _asked: dict[str, _Asked] = field(default_factory=dict)  # by id at vLLM
    _ids: Any = field(default_factory=count)

    def __bool__(self) -> bool:
        return bool(self._asked)

    async def start(self, core: Core) -> None:
        """Ask a core that has no request yet for the base's answers. Raises the client's error when it has died."""
        self._asked.clear()
        if core.pools or core.config.lora_config is None:
            return
        await core.client.add_request_async(_request(core, PROBE + "base", None))
        while True:
            for output in (await core.client.get_output_async()).outputs:
                if output.finish_reason is not None:
                    self.base = _answers(output)
                    return

    def begin(self, digest: str) -> str:
        """A probe of this adapter begins. Returns its id."""
        core_id = f"{PROBE}{digest}/{next(self._ids)}"
        self._asked[core_id] = _Asked(digest, now_s())
        return core_id

    async def ask(self, core: Core, core_id: str, number: int) -> Reading | None:
        """Send the probe of the adapter with vLLM's number `number`, and take its norms."""
        asked = self._asked[core_id]
        sent: list[Any] = [core.client.collective_rpc_async("lora_norms", args=(number,))]
        if self.base.size:
            sent.append(core.client.add_request_async(_request(core, core_id, (asked.digest, number))))
        else:
            asked.answers = NOTHING
        try:
            told, *_ = await asyncio.gather(*sent)
        except Exception as error:
            return self._failed(core_id, repr(error))
        layers = core.config.model_config.hf_text_config.num_hidden_layers
        asked.norms, asked.told = _account(told[0], layers), True
        return self._complete(core_id)

    def take(self, output: Any) -> Reading | None:
        """An output of vLLM, perhaps of a probe."""
        asked = self._asked.get(output.request_id)
        if asked is None:
            return None
        if output.new_prompt_logprobs_tensors is None:
            return self._failed(output.request_id, f"vLLM ended the probe: {output.finish_reason}")
        asked.answers = _answers(output)
        return self._complete(output.request_id)

    def left(self, digest: str) -> list[str]:
        """The adapter left its slot: ids of its probes, whose outputs no longer count."""
        gone = [core_id for core_id, asked in self._asked.items() if asked.digest == digest]
        for core_id in gone:
            del self._asked[core_id]
        return gone

    def _complete(self, core_id: str) -> Reading | None:
        asked = self._asked.get(core_id)
        if asked is None or not asked.told or asked.answers is None:
            return None
        del self._asked[core_id]
        took_s = now_s() - asked.began_s
        return Reading(digest=asked.digest, base=self.base, adapter=asked.answers, account=asked.norms, took_s=took_s)

    def _failed(self, core_id: str, error: str) -> Reading | None:
        asked = self._asked.pop(core_id, None)
        return blank(asked.digest, error, took_s=now_s() - asked.began_s) if asked is not None else None


def _request(core: Core, core_id: str, adapter: tuple[str, int] | None) -> Any:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0, detokenize=False)
    return EngineCoreRequest(
        request_id=core_id,
        external_req_id=core_id,
        prompt_token_ids=prompt(core.vocab_size),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None if adapter is None else LoRARequest(adapter[0], adapter[1], f"/{adapter[0]}"),
        cache_salt=core_id,
        data_parallel_rank=None,
    )


def _answers(output: Any) -> np.ndarray:
    """The log-probability of each token of the prompt after the first, float32."""
    found: np.ndarray = output.new_prompt_logprobs_tensors.logprobs.float().numpy()
    return found[:, 0]


def _account(told: list[tuple[str, int, float, float]] | None, layers: int) -> Account | None:
    if told is None:
        return None
    found: dict[str, np.ndarray] = {}
    for module, layer, a, b in told:
        found.setdefault(module, np.zeros((layers, 2)))[layer] = a, b
    return {module: norms for module, norms in found.items() if norms.any()}
