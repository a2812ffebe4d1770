"""The demo model's configuration, byte tokenizer and chat template, in Hugging Face's file format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TASK_TOKENS = tuple(f"<|task_{index:02d}|>" for index in range(24))
TOOL_TOKENS = ("<|tools|>", "<|tool|>")  # the functions of a request, and the result of a call
SPECIAL_TOKENS = (PAD, BOS, END, *ROLES, *TASK_TOKENS, *TOOL_TOKENS)

CONTEXT_TOKENS = 2048

# Of a tool the model sees what it needs to call it: `name(parameter, parameter)`. Calls are written as Hermes models do.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if tools %}{{- '<|tools|>' }}"
    "{%- for tool in tools %}"
    "{%- set given = tool['function']['parameters'] or {} %}"
    "{%- set names = given['required'] or (given['properties'] or {}) | list %}"
    "{{- ('' if loop.first else '\n') + tool['function']['name'] + '(' + names | join(', ') + ')' }}"
    "{%- endfor %}{{- '<|end|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{- raise_exception('the demo model knows the roles system, user, assistant and tool') }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] or '') | trim }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{%- set function = {'name': call['function']['name'], 'arguments': call['function']['arguments']} %}"
    "{{- '<tool_call>' + function | tojson + '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def build_tokenizer() -> Tokenizer:
    """One token per byte behind the special tokens: round-trips any UTF-8 text and shows the model each letter."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def model_config() -> dict[str, Any]:
    """A Llama of 1.7M parameters with grouped-query attention: six query heads share two key/value heads."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": CONTEXT_TOKENS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": len(SPECIAL_TOKENS) + 256,
    }


def write_model_files(folder: Path) -> None:
    """Write everything but the weights into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = model_config()
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    named = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": {**ends, "do_sample": False, "max_new_tokens": 128},
        "special_tokens_map.json": named,
        "tokenizer_config.json": {
            **named,
            "added_tokens_decoder": {
                str(index): {
                    "content": token, "lstrip": False, "normalized": False,
                    "rstrip": False, "single_word": False, "special": True,
                }
                for index, token in enumerate(SPECIAL_TOKENS)
            },
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_TOKENS,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
