"""Request bodies of nearly the largest size that could stall a gateway's event loop: deep, wide, dense, repetitive, or broken.

Each shape fills one place of a request with one kind of content, so that every place meets every kind: what costs little in one
field may be read item by item in another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from motet.services.gateway.config import MAX_BODY_BYTES

SIZE = MAX_BODY_BYTES - 300
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
CALL = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}},'

# what fills a JSON array, repeated
ITEMS = {
    "lists": "[],",
    "objects": '{"a":1},',
    "integers": "7,",
    "token ids": "250,",
    "floats": "0.25,",
    "texts": '"ab",',
    "empty texts": '"",',
    "nulls": "null,",
    "escapes": '"\\u00e4\\n",',
    "pairs": "[1,2],",
    "calls": CALL,
    "parts": '{"type":"text","text":"a"},',
    "images": '{"type":"image_url","image_url":{"url":"data:image/png;base64,iVBORw0KGgo="}},',
    "messages": '{"role":"user","content":"a"},',
    "tools": '{"type":"function","function":{"name":"f"}},',
}
# what fills a JSON string, repeated
CHARACTERS = {
    "letters": "a",
    "words": "many adapters, one model. ",
    "commas": ",",
    "digits": "1,2;3 ",
    "quotes": '\\"',
    "backslashes": "\\\\",
    "control": "\\u0001",
    "emoji": "🎉",
    "surrogates": "\\ud83c\\udf89",
    "brackets": "[{",
    "newlines": "\\n",
}
# where an array can stand: path, before, after; a comma is cut from what fills it
ARRAYS = {
    "prompt": (TEXT, '{"max_tokens":1,"prompt":[', "]}"),
    "prompts": (TEXT, '{"max_tokens":1,"prompt":[[', "]]}"),
    "echoed prompt": (TEXT, '{"max_tokens":1,"echo":true,"truncate_prompt_tokens":9,"prompt":[', "]}"),
    "stop": (TEXT, '{"max_tokens":1,"prompt":"x","stop":[', "]}"),
    "stop_token_ids": (TEXT, '{"max_tokens":1,"prompt":"x","stop_token_ids":[', "]}"),
    "allowed_token_ids": (TEXT, '{"max_tokens":1,"prompt":"x","allowed_token_ids":[', "]}"),
    "bad_words": (TEXT, '{"max_tokens":1,"prompt":"x","bad_words":[', "]}"),
    "choice": (TEXT, '{"max_tokens":1,"prompt":"x","structured_outputs":{"choice":[', "]}}"),
    "schema": (
        TEXT,
        '{"prompt":"x","response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"enum":[',
        "]}}}}",
    ),
    "metadata": (TEXT, '{"max_tokens":1,"prompt":"x","metadata":[', "]}"),
    "unserved": (TEXT, '{"max_tokens":1,"prompt":"x","guided_json":[', "]}"),
    "unknown": (TEXT, '{"max_tokens":1,"prompt":"x","nothing":[', "]}"),
    "messages": (CHAT, '{"max_tokens":1,"messages":[', "]}"),
    "content": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":[', "]}]}"),
    "tool_calls": (CHAT, '{"max_tokens":1,"messages":[{"role":"assistant","content":"a","tool_calls":[', "]}]}"),
    "of a message": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":"a","j":[', "]}]}"),
    "kind of a part": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":[{"type":[', "]}]}]}"),
    "documents": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"documents":[', "]}"),
    "template": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":[', "]}}"),
    "tools": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"tools":[', "]}"),
    "parameters": (
        CHAT,
        '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"tool_choice":"required",'
        '"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[',
        "]}}}]}",
    ),
    "input": (EMBED, '{"input":[', "]}"),
    "inputs": (EMBED, '{"input":[[', "]]}"),
    "tokenized messages": (TOKENIZE, '{"messages":[', "]}"),
    "tokens": (DETOKENIZE, '{"tokens":[', "]}"),
}
# where a text can stand
TEXTS = {
    "prompt": (TEXT, '{"max_tokens":1,"prompt":"', '"}'),
    "cut prompt": (TEXT, '{"max_tokens":1,"truncate_prompt_tokens":5,"echo":true,"prompt":"', '"}'),
    "content": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":"', '"}]}'),
    "cut content": (CHAT, '{"max_tokens":1,"truncate_prompt_tokens":5,"messages":[{"role":"user","content":"', '"}]}'),
    "of a message": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":"a","j":"', '"}]}'),
    "arguments": (
        CHAT,
        '{"max_tokens":1,"messages":[{"role":"assistant","content":"a","tool_calls":[{"function":{"name":"f","arguments":"',
        '"}}]}]}',
    ),
    "image": (
        CHAT,
        '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,',
        '"}}]}]}',
    ),
    "template": (CHAT, '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":"', '"}}'),
    "model": (TEXT, '{"prompt":"x","model":"', '"}'),
    "stop": (TEXT, '{"max_tokens":1,"prompt":"x","stop":"', '"}'),
    "regex": (TEXT, '{"max_tokens":1,"prompt":"x","regex":"', '"}'),
    "json_schema": (TEXT, '{"max_tokens":1,"prompt":"x","structured_outputs":{"json":"', '"}}'),
    "user": (TEXT, '{"max_tokens":1,"prompt":"x","user":"', '"}'),
    "a key": (TEXT, '{"max_tokens":1,"prompt":"x","', '":1}'),
    "input": (EMBED, '{"truncate_prompt_tokens":5,"input":"', '"}'),
    "tokenized": (TOKENIZE, '{"return_token_strs":true,"prompt":"', '"}'),
}
_ASKED = '{"messages":[{"role":"user","content":"a"}]'
DEEP = {"arrays": ("[", "]"), "objects": ('{"a":', "}")}


def filled(before: str, unit: str, after: str, size: int = SIZE) -> bytes:
    """`unit` between `before` and `after`, as often as `size` bytes have room for; without a comma at its end."""
    room = size - len(before.encode()) - len(after.encode())
    return (before + (unit * (room // len(unit.encode()))).rstrip(",") + after).encode()


def _keys(before: str, after: str, value: str) -> bytes:
    count = (SIZE - 200) // (len(value) + 10)
    return (before + ",".join(f'"{i:06d}":{value}' for i in range(count)) + after).encode()


def _ids(tokens: int, prompts: int, **fields: object) -> bytes:
    return json.dumps({"prompt": [[7 + i % 90 for i in range(tokens)]] * prompts} | fields).encode()


def shapes(size: int = SIZE) -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body) of every shape."""
    for place, (path, before, after) in ARRAYS.items():
        for kind, unit in ITEMS.items():
            yield f"{place}: {kind}", path, filled(before, unit, after, size)
        for kind, (open_, close) in DEEP.items():
            for depth in (900, size // (len(open_) + len(close)) - 200):
                inner = open_ * depth + "1" + close * depth
                yield f"{place}: {depth} {kind} deep", path, (before + inner + after).encode()
            unit = open_ * 60 + "1" + close * 60 + ","
            yield f"{place}: many {kind} 60 deep", path, filled(before, unit, after, size)
    for place, (path, before, after) in TEXTS.items():
        for kind, unit in CHARACTERS.items():
            yield f"{place} of {kind}", path, filled(before, unit.replace(",", ", "), after, size)
    for value in ("1", '""', "[]", '{"a":[]}'):
        yield f"unknown keys {value}", TEXT, _keys('{"prompt":"x",', "}", value)
        yield f"unserved keys {value}", TEXT, _keys('{"prompt":"x","metadata":{', "}}", value)
        yield f"biases {value}", TEXT, _keys('{"prompt":"x","logit_bias":{', "}}", value)
        yield f"message keys {value}", CHAT, _keys('{"messages":[{"role":"user","content":"a",', "}]}", value)
        yield (
            f"template keys {value}",
            CHAT,
            _keys('{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{', "}}", value),
        )
        yield f"schema keys {value}", TEXT, _keys('{"prompt":"x","structured_outputs":{"json":{', "}}}", value)
    for tokens in (1, 100, 1000, 2000, 8000):
        for more in ({}, {"echo": True}, {"echo": True, "logprobs": 1}, {"truncate_prompt_tokens": 3, "echo": True}):
            yield f"128 x {tokens} ids {more}", TEXT, _ids(tokens, 128, max_tokens=1, **more)
        yield f"{tokens} ids, 64 choices", TEXT, _ids(tokens, 2, max_tokens=1, n=64)
    for name, text in (("[", "["), ("{", '{"a":'), ('"', '"'), ("spaces", " "), ("digits", "1"), ("\\", '"\\'), ("NUL", "\0")):
        yield f"not JSON: {name}", TEXT, (text * (size // len(text))).encode()
    yield "a long number", TEXT, b'{"prompt":"x","temperature":' + b"1" * (size - 100) + b"}"
    yield "a long fraction", TEXT, b'{"prompt":"x","temperature":0.' + b"1" * (size - 100) + b"}"
    yield "a long exponent", TEXT, b'{"prompt":"x","temperature":1e' + b"1" * (size - 100) + b"}"
    yield "cut off", TEXT, filled('{"prompt":[', "[7],", "", size)
    yield "not UTF-8", TEXT, b'{"prompt":"' + b"\xff" * (size - 100) + b'"}'
