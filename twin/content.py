"""The tokens of simulated requests, for prefix caches: equal prefix blocks have equal tokens, all other tokens are unique."""

from __future__ import annotations

from array import array

from motet.policies.memory.kv_blocks import prompt_keys, told_tokens
from motet.shared.wire.prefixes import PrefixKeys, pack_keys
from motet.twin.workload import Request

NO_CONTENT = array("i")


def content(request: Request, length: int) -> array[int]:
    """Token ids of prompt and output to come, so many together."""
    tokens = array("i")
    for block_id in request.prefix:
        tokens.extend(array("i", (block_id,)) * request.prefix_tokens)
    end = request.prompt_tokens + request.output_tokens
    del tokens[end if len(tokens) >= end else request.prompt_tokens :]
    del tokens[length:]
    return tokens + array("i", (~request.index,)) * (length - len(tokens))


def prefix_keys(request: Request, block_size: int) -> PrefixKeys:
    """The keys of the prompt that a gateway sends for workers with such blocks."""
    prompt = content(request, request.prompt_tokens).tobytes()
    return PrefixKeys(told_tokens(block_size), pack_keys(prompt_keys(prompt, block_size, request.adapter.digest, b"")))
