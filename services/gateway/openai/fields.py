"""Request fields of other servers' APIs that Motet does not serve, and what happens to each.

No field is dropped silently. A field that would change the answer is refused by name, except with values that ask for nothing
(`harmless`). A field that cannot change the answer is accepted without effect (`harmless` is None). Any other field is
refused as unknown, as OpenAI does. `docs/api.md` shows this table together with the served fields (`protocol`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from motet.shared.errors import BadRequest


class Unserved(msgspec.Struct, frozen=True):
    """A field that is not served: the reason, and the values that are accepted nevertheless (None: any value)."""

    why: str
    harmless: tuple[Any, ...] | None = (None,)

    def check(self, name: str, value: Any) -> None:
        """Raises BadRequest naming the field when `value` asks for what is not served."""
        if self.harmless is not None and not any(type(value) is type(one) and value == one for one in self.harmless):
            raise BadRequest(f"{name} is not supported: {self.why}", param=name)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the field."""
        if self.harmless is None:
            return {"description": f"Accepted without effect: {self.why}."}
        return {"description": f"Only these values are accepted: {self.why}.", "enum": list(self.harmless)}


_OFF = (None, False)
_HINT = None  # any value

_GRAMMAR = "use structured_outputs, as in vLLM since it removed this field"
_TEXT_ONLY = "input is text and images, output is text"
_AS_TRAINED = "images are prepared as the model's own processor does it"
_NO_TOOLS = "use tools and tool_choice"
_ELSEWHERE = "the scheduler decides where a request runs"
_ADAPTERS = "register adapters under /v1/adapters and request them by name"
_NO_BEAMS = "beam search is not served"
_NOT_RETURNED = "answers do not contain this"
_THINKING = "reasoning is not limited"

_BOTH: dict[str, Unserved] = {
    # OpenAI
    "user": Unserved("it identifies the end user to the provider", _HINT),
    "metadata": Unserved("it labels stored answers, and answers are not stored", _HINT),
    "service_tier": Unserved("use the header x-slo-class", (None, "auto", "default")),
    # vLLM
    "use_beam_search": Unserved(_NO_BEAMS, _OFF),
    "length_penalty": Unserved(_NO_BEAMS, (None, 1, 1.0)),
    "watermarking": Unserved("text is not watermarked", _OFF),
    "spaces_between_special_tokens": Unserved("it affects slow tokenizers only, which are not used here", _HINT),
    "logprob_token_ids": Unserved("log-probabilities are returned for the most likely tokens only"),
    "guided_json": Unserved(_GRAMMAR),
    "guided_regex": Unserved(_GRAMMAR),
    "guided_choice": Unserved(_GRAMMAR),
    "guided_grammar": Unserved(_GRAMMAR),
    "guided_decoding_backend": Unserved(_GRAMMAR),
    "guided_whitespace_pattern": Unserved(_GRAMMAR),
    "structural_tag": Unserved("use structured_outputs.structural_tag"),
    "session_id": Unserved("it is a routing hint", _HINT),
    "return_tokens_as_token_ids": Unserved("log-probabilities name tokens by their text; use return_token_ids", _OFF),
    "routed_experts_prompt_start": Unserved("mixture-of-experts models are not served", (None, 0)),
    "return_token_offsets": Unserved(_NOT_RETURNED, _OFF),
    "return_mm_kwargs": Unserved("it affects vLLM's render endpoints only", _HINT),
    "kv_transfer_params": Unserved("prefill and decode run on the same worker"),
    "ec_transfer_params": Unserved("prefill and decode run on the same worker"),
    "vllm_xargs": Unserved("there are no extensions that use it"),
    "repetition_detection": Unserved("use repetition_penalty, frequency_penalty or stop"),
    "thinking_token_budget": Unserved(_THINKING, (None, -1)),
    "stream_interval": Unserved("every token is its own event; events that are ready together leave together", _HINT),
    # SGLang
    "stop_regex": Unserved("stop takes strings", (None, [])),
    "return_hidden_states": Unserved(_NOT_RETURNED, _OFF),
    "return_routed_experts": Unserved(_NOT_RETURNED, _OFF),
    "routed_experts_start_len": Unserved("mixture-of-experts models are not served", (None, 0)),
    "return_cached_tokens_details": Unserved("usage.prompt_tokens_details has the number of cached tokens", _OFF),
    "session_params": Unserved("requests do not share sessions"),
    "custom_params": Unserved("there are no custom logit processors"),
    "custom_logit_processor": Unserved("client code is never run"),
    "images_config": Unserved(_AS_TRAINED),
    "bootstrap_host": Unserved(_ELSEWHERE),
    "bootstrap_port": Unserved(_ELSEWHERE),
    "bootstrap_room": Unserved(_ELSEWHERE),
    "routed_dp_rank": Unserved(_ELSEWHERE),
    "disagg_prefill_dp_rank": Unserved(_ELSEWHERE),
    "data_parallel_rank": Unserved(_ELSEWHERE),
    "extra_key": Unserved("use cache_salt to keep prefixes apart"),
    "ngram_corpus_id": Unserved("tokens are not drafted from a corpus"),
    "custom_labels": Unserved("metrics have fixed labels", _HINT),
    # LoRAX
    "adapter_source": Unserved(_ADAPTERS),
    "adapter_parameters": Unserved(_ADAPTERS),
    "api_token": Unserved(_ADAPTERS),
}

CHAT: Mapping[str, Unserved] = _BOTH | {
    # OpenAI
    "audio": Unserved(_TEXT_ONLY),
    "modalities": Unserved(_TEXT_ONLY, (None, [], ["text"])),
    "functions": Unserved(_NO_TOOLS, (None, [])),
    "function_call": Unserved(_NO_TOOLS, (None, "none", "auto")),
    "moderation": Unserved("texts are not moderated"),
    "prediction": Unserved("it is a hint for speed", _HINT),
    "prompt_cache_key": Unserved("it is a routing hint", _HINT),
    "prompt_cache_options": Unserved("prefixes stay cached while there is room", _HINT),
    "prompt_cache_retention": Unserved("prefixes stay cached while there is room", _HINT),
    "safety_identifier": Unserved("it identifies the end user to the provider", _HINT),
    "store": Unserved("answers are not stored", _OFF),
    "verbosity": Unserved("state the wanted length in the prompt", (None, "medium")),
    "web_search_options": Unserved("there is no web search"),
    # vLLM
    "echo": Unserved("answers contain the new text only", _OFF),
    "chat_template": Unserved("the model's own template is used"),
    "media_io_kwargs": Unserved(_AS_TRAINED),
    "mm_processor_kwargs": Unserved(_AS_TRAINED),
    "return_prompt_text": Unserved(_NOT_RETURNED, _OFF),
    # SGLang
    "return_prompt_token_ids": Unserved("use return_token_ids", _OFF),
    "return_meta_info": Unserved(_NOT_RETURNED, _OFF),
    "reasoning": Unserved("use reasoning_effort"),
    "task": Unserved("it affects one model family only, which is not served"),
    "stream_reasoning": Unserved("reasoning is streamed as it comes", _HINT),
    "max_dynamic_patch": Unserved(_AS_TRAINED),
    "min_dynamic_patch": Unserved(_AS_TRAINED),
    "use_audio_in_video": Unserved(_TEXT_ONLY, _OFF),
    "input_ids": Unserved("use /v1/completions for token ids"),
    # LoRAX
    "tool_prompt": Unserved(_NO_TOOLS),
    "guideline": Unserved("use chat_template_kwargs"),
}

COMPLETION: Mapping[str, Unserved] = _BOTH | {
    "suffix": Unserved("text is only continued at its end", (None, "")),
    "prompt_embeds": Unserved("prompts are text or token ids"),
}

EMBEDDING: Mapping[str, Unserved] = {
    # OpenAI
    "user": _BOTH["user"],
    # vLLM
    "messages": Unserved("use input"),
    "embed_dtype": Unserved("numbers are float32", (None, "float32")),
    "endianness": Unserved("numbers are little-endian", (None, "native", "little")),
    "use_activation": Unserved("the model decides whether embeddings have length 1"),
    "normalize": Unserved("the model decides whether embeddings have length 1"),
    "mm_processor_kwargs": Unserved("embeddings are made of text"),
    "media_io_kwargs": Unserved("embeddings are made of text"),
    "padding": Unserved("inputs are not padded", (None, "do_not_pad")),
    "chat_template": Unserved("use input"),
    "chat_template_kwargs": Unserved("use input"),
    "add_generation_prompt": Unserved("use input", _OFF),
    "continue_final_message": Unserved("use input", _OFF),
    # SGLang
    "rid": Unserved("use request_id"),
    "lora_path": Unserved("use model"),
}

_ONE_PICTURE = "answers are single pictures: PNG, JPEG or WebP"
_CONTROLLED = "ControlNet and IP-Adapter are not served: use strength or a mask on /v1/images/edits"
_LORAS = 'use adapters: [{"name": ..., "weight": ...}]'

_PICTURES: dict[str, Unserved] = {
    # OpenAI
    "quality": Unserved("steps and sampler decide it", _HINT),
    "style": Unserved("adapters are what changes the style", _HINT),
    "moderation": Unserved("pictures are not moderated here", _HINT),
    "user": Unserved("it identifies the end user to the provider", _HINT),
    "safety_identifier": Unserved("it identifies the end user to the provider", _HINT),
    "background": Unserved("pictures are opaque", (None, "auto", "opaque")),
    "complexity": Unserved(_ONE_PICTURE),
    "frame_count": Unserved(_ONE_PICTURE, (None, 1)),
    "frame_duration_ms": Unserved(_ONE_PICTURE),
    "svg": Unserved(_ONE_PICTURE),
    # vLLM-Omni, SGLang
    "lora": Unserved(_LORAS),
    "loras": Unserved(_LORAS),
    "lora_path": Unserved(_LORAS),
    "lora_scale": Unserved(_LORAS),
    "steps": Unserved("use num_inference_steps"),
    "true_cfg_scale": Unserved("use guidance_scale"),
    "cfg_scale": Unserved("use guidance_scale"),
    "width": Unserved("use size"),
    "height": Unserved("use size"),
    "output_quality": Unserved("use output_compression"),
    "scheduler": Unserved("use sampler"),
    "clip_skip": Unserved("text encoders are used as the base was trained"),
    "generator_device": Unserved(
        "noise is drawn on the CPU, so that a seed gives the same picture on every worker", (None, "cpu")
    ),
    "enable_teacache": Unserved("no step is skipped", _OFF),
    "vae_use_slicing": Unserved("workers decide how they decode", _HINT),
    "vae_use_tiling": Unserved("workers decide how they decode", _HINT),
    "controlnet": Unserved(_CONTROLLED),
    "control_image": Unserved(_CONTROLLED),
    "ip_adapter": Unserved(_CONTROLLED),
    "ip_adapter_image": Unserved(_CONTROLLED),
}

IMAGE: Mapping[str, Unserved] = _PICTURES | {
    "strength": Unserved("it belongs to a source picture: /v1/images/edits"),
    "image": Unserved("a source picture belongs to /v1/images/edits"),
    "mask": Unserved("a mask belongs to /v1/images/edits"),
}

IMAGE_EDIT: Mapping[str, Unserved] = _PICTURES | {
    "images": Unserved("one source picture is served: image"),
    "markup": Unserved("use mask"),
    "input_fidelity": Unserved("use strength"),
}

TOKENIZE: Mapping[str, Unserved] = {
    name: CHAT[name] for name in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
} | {"tools": Unserved("use chat_template_kwargs", (None, []))}


def check(fields: dict[str, msgspec.Raw], unserved: Mapping[str, Unserved]) -> dict[str, msgspec.Raw]:
    """`fields` without those of `unserved`. Raises BadRequest naming a field that asks for what is not served."""
    for name in fields.keys() & unserved.keys():
        unserved[name].check(name, msgspec.json.decode(fields[name]))
    return {name: value for name, value in fields.items() if name not in unserved}
