"""Requests in the worker's form, and their conversion to the form of vLLM's core.

vLLM is imported in functions, because a worker with the native engine runs without it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from motet.policies.step.batch_state import due_s
from motet.policies.step.engine_entry import Entrant
from motet.services.worker.engines.request import EngineRequest
from motet.services.worker.vllm_engine.core import Core
from motet.services.worker.vllm_engine.peft_files import PeftAdapter
from motet.shared.errors import BadRequest, MotetError
from motet.shared.model import RequestBrief, StructuredOutput
from motet.shared.telemetry import logger
from motet.shared.wire.stream import TokenLogprobs

if TYPE_CHECKING:
    from motet.services.worker.vllm_engine.images import ImagePrompt

log = logger("motet.worker.vllm")
SUSPECT_LOSSES = 2
"""After so many workers or cores lost in a row, a request runs alone. One loss may have been caused by any request."""


@dataclass(slots=True, eq=False, kw_only=True)
class VllmSequence(Entrant):
    """A request in this engine. `core_id`: its id at vLLM, "" while it waits. `reported`: vLLM has sent output for it."""

    request: EngineRequest
    prompt_tokens: int
    max_length: int
    core_id: str = ""
    entered_s: float = 0.0
    reported: bool = False
    image_tokens: int = 0
    """Tokens of its images, beyond one placeholder each; known when it has entered."""

    @property
    def output_tokens(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :].tolist()

    def brief(self) -> RequestBrief:
        """The facts of the request that schedulers need."""
        return self.request.brief(self.output_tokens, running=bool(self.core_id))


def sequence(request: EngineRequest, core: Core, slot_bytes: int) -> VllmSequence:
    """A request that begins to wait. `slot_bytes`: device memory of one adapter slot."""
    adapter = request.weights
    longest = core.max_model_len if request.embedding is None else request.prompt_tokens + 1
    return VllmSequence(
        order=0,
        priority=request.priority,
        due_s=due_s(request.arrival_s, request.slo.ttft_slo_ms, begun=bool(request.output)),
        tokens=request.tokens,
        adapter=adapter.digest if adapter else "",
        adapter_bytes=slot_bytes if adapter else 0,
        request=request,
        prompt_tokens=request.prompt_tokens,
        max_length=min(longest, request.prompt_tokens + request.sampling.max_tokens),
        rank=adapter.rank if adapter else 0,
        expected_length=request.prompt_tokens + request.predicted_tokens,
        tenant=request.tenant,
        tenant_weight=request.tenant_weight,
        cache_scope=request.cache_scope,
        pausable=pausable(request, seeds=core.takes_seeds),
        suspect=request.losses >= SUSPECT_LOSSES,
    )


def core_request(live: VllmSequence, core: Core, number: int, images: ImagePrompt | None = None, *, rejections: int = 0) -> Any:
    """The request in the form of vLLM's core. `number`: vLLM's number of the adapter; `images`: for a prompt with images;
    `rejections`: how often the adapter was rejected, after which it shares no KV blocks with requests from before.

    Raises BadRequest, or vLLM's error for parameters that it does not take.
    """
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest

    request, pools = live.request, live.request.embedding is not None
    lora = None
    if request.weights is not None:
        adapter = cast(PeftAdapter, request.weights)
        # vLLM has read the files (`adapters.py`). Its cache tells paths apart, and theirs changes with every copy on the host.
        lora = LoRARequest(adapter.digest, number, f"/{adapter.digest}")
    return EngineCoreRequest(
        request_id=live.core_id,
        external_req_id=live.core_id,
        prompt_token_ids=list(live.tokens) if images is None else images.tokens + live.output,
        mm_features=None if images is None else images.features,
        sampling_params=None if pools else sampling_params(live, core),
        pooling_params=pooling_params(live) if pools else None,
        arrival_time=live.entered_s,
        lora_request=lora,
        cache_salt=cache_salt(request.cache_scope, live.adapter) + (f"#{rejections}" if rejections else "") or None,
        data_parallel_rank=None,
    )


def cache_salt(scope: bytes, adapter_digest: str) -> str:
    """vLLM's salt of a request: requests with another one share no KV blocks with it."""
    return scope.hex() + adapter_digest


def scope_of(salt: str, adapter_digest: str) -> bytes | None:
    """The scope in a `cache_salt` of this adapter, "" for none; None if it is not one."""
    try:
        return bytes.fromhex(salt.removesuffix(adapter_digest)) if salt.endswith(adapter_digest) else None
    except ValueError:
        return None


def pooling_params(live: VllmSequence) -> Any:
    """vLLM's parameters of a request for an embedding."""
    from vllm.pooling_params import PoolingParams

    assert live.request.embedding is not None
    return PoolingParams(task="embed", dimensions=live.request.embedding.dimensions)


def sampling_params(live: VllmSequence, core: Core) -> Any:
    """vLLM's parameters of a request for text. Raises as `core_request` does."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    request, asked, output = live.request, live.request.sampling, live.output
    if asked.structured is not None and output:
        raise BadRequest("a constrained output cannot be resumed", param="structured_outputs")
    bias = dict(asked.logit_bias)
    if output and (asked.presence_penalty or asked.frequency_penalty) and not core.speculates:
        # vLLM counts the output as prompt; a bias of a token stands for its penalties so far
        for token in set(output):
            penalty = asked.presence_penalty + asked.frequency_penalty * output.count(token)
            if penalty:
                bias[token] = bias.get(token, 0.0) - penalty
    sampling = SamplingParams(
        max_tokens=live.max_length - live.length,
        min_tokens=max(0, asked.min_tokens - len(output)),
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        logit_bias=bias or None,
        seed=asked.seed if asked.temperature and core.takes_seeds else None,
        stop_token_ids=sorted(ending(request, core)),
        ignore_eos=True,
        logprobs=asked.logprobs,
        prompt_logprobs=None if output else asked.prompt_logprobs,
        structured_outputs=None if asked.structured is None else constraint(asked.structured),
        detokenize=False,
        allowed_token_ids=list(asked.allowed_token_ids) or None,
        output_kind=RequestOutputKind.DELTA,
    )
    if asked.structured is not None:  # its grammar ends with one of these, or never
        sampling._all_stop_token_ids |= core.eos_token_ids
    if asked.bad_words:
        sampling._bad_words_token_ids = [list(word) for word in asked.bad_words]
    return sampling


def ending(request: EngineRequest, core: Core) -> set[int]:
    """The tokens that end a request's output."""
    return {*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else core.eos_token_ids)}


def pausable(request: EngineRequest, *, seeds: bool) -> bool:
    """Whether vLLM can continue the request after a pause as if it had not been interrupted.

    It cannot with a constraint or a seed, which it would begin anew, nor with penalties or forbidden words, for which it would
    count the output as prompt.
    """
    asked = request.sampling
    penalties = asked.presence_penalty or asked.frequency_penalty or asked.repetition_penalty != 1.0
    seeded = seeds and asked.temperature and asked.seed is not None
    return not (penalties or seeded or asked.structured or any(len(word) > 1 for word in asked.bad_words))


def constraint(asked: StructuredOutput) -> Any:
    """vLLM's form of a constraint. Raises ValueError for invalid JSON."""
    from vllm.sampling_params import StructuredOutputsParams

    value: Any = asked.value
    if asked.kind == "json_object":
        value = True
    elif asked.kind == "choice":
        value = json.loads(asked.value)
    return StructuredOutputsParams(
        **{asked.kind: value},
        disable_any_whitespace=asked.disable_any_whitespace,
        disable_additional_properties=asked.disable_additional_properties,
        whitespace_pattern=asked.whitespace_pattern or None,
    )


def refusal(error: Exception, request: EngineRequest) -> MotetError:
    """The error text for a client whose request vLLM refused."""
    if isinstance(error, MotetError):
        return error
    from vllm.exceptions import VLLMClientError

    if not isinstance(error, ValueError | VLLMClientError):
        log.error("a request was not understood", exc_info=error)
        return MotetError(f"the engine failed: {error!r}")
    param = getattr(error, "parameter", None)
    if request.embedding is not None:
        param = "dimensions"
    elif request.sampling.structured is not None:
        param = "structured_outputs"
    elif "speculative" in str(error):
        param = "min_p" if request.sampling.min_p else "logit_bias"
    return BadRequest(str(error), param=param)


def float32_bytes(embedding: Any) -> bytes:
    """A tensor of numbers as little-endian float32 bytes."""
    return bytes(embedding.float().flatten().numpy().astype("<f4").tobytes())


def token_logprobs(told: Any, most: int) -> list[TokenLogprobs]:
    """Log-probabilities from vLLM's columns: of the token itself, then of the most likely ones."""
    return [
        TokenLogprobs(float(values[0]), [int(one) for one in ids[1 : most + 1]], [float(one) for one in values[1 : most + 1]])
        for ids, values in zip(told.logprob_token_ids, told.logprobs, strict=True)
    ]
