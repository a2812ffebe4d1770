"""Chat templates and tokens exactly as transformers makes them from the same files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from motet.examples.demo import DEMO
from motet.services.gateway.openai import prompt
from motet.services.gateway.openai.prompt import Prompts
from motet.shared.clock import now_s
from motet.shared.config import ConfigError
from motet.shared.errors import BadRequest, PromptTooLong
from tests.services.gateway.support_tokenizers import byte_level, metaspace, sentence_piece, word_piece, write_model_dir

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedTokenizerFast

MODEL = DEMO / "model"
CONVERSATIONS = [
    [{"role": "user", "content": "hello world"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "größere 🎉\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b <s>"}, {"role": "user", "content": ""}],
]
CHATML = """{%- for m in messages %}
    {%- if loop.first and m['role'] != 'system' %}
        {{- '<|system|>default</s>\n' }}
    {%- endif %}
    {{- '<|' + m.role + '|>' + m.content + '</s>' + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ '' }}{% endgeneration %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
{{- {'a': 'ü<'} | tojson }}"""


def reference(model_dir: Path) -> PreTrainedTokenizerFast:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PreTrainedTokenizerFast.from_pretrained(str(model_dir))


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("generate", [True, False])
def test_chat_prompts_are_those_of_transformers_token_for_token(
    tmp_path: Path, template: str | None, messages: list[dict[str, str]], generate: bool
) -> None:
    model_dir = write_model_dir(tmp_path, **({"chat_template": template} if template else {}))
    expected = reference(model_dir).apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)
    assert Prompts(model_dir).chat(messages, add_generation_prompt=generate) == expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_demo_models_chat_prompts_are_those_of_transformers(messages: list[dict[str, str]]) -> None:
    expected = reference(MODEL).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Prompts(MODEL).chat(messages) == expected


def test_special_tokens_that_only_the_configuration_names_are_one_token_in_a_chat(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path, chat_template="{{ image_token }}{{ messages[0].content }}{{ eos_token }}")
    settings = json.loads((model_dir / "tokenizer_config.json").read_text())
    settings |= {"image_token": "<image>", "additional_special_tokens": ["<tool>"], "eos_token": "the"}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = Prompts(model_dir).chat([{"role": "user", "content": "<tool>"}])
    assert len(tokens) == 3
    assert tokens == reference(model_dir).apply_chat_template([{"role": "user", "content": "<tool>"}], return_dict=False)


def test_plain_prompts_get_the_tokenizers_special_tokens_once(tmp_path: Path) -> None:
    prompts = Prompts(write_model_dir(tmp_path, sentence_piece()))
    bos = 1
    plain, with_bos = prompts.texts(["hello world", "<s>hello"])
    assert plain[0] == bos
    assert with_bos[:2].count(bos) == 1
    assert prompts.texts(["hello world"], add_special_tokens=False) == [plain[1:]]


def test_what_the_template_refuses_is_a_bad_request_that_names_messages(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="unknown role tool") as refused:
        Prompts(write_model_dir(tmp_path)).chat([{"role": "tool", "content": "x"}])
    assert refused.value.param == "messages"


def test_a_model_without_a_chat_template_says_so_and_with_what_it_could_chat(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no chat template: .*chatml.*--chat-template") as refused:
        Prompts(write_model_dir(tmp_path, chat_template="")).chat([{"role": "user", "content": "x"}])
    assert refused.value.param == "messages"


def test_a_final_message_can_be_continued(tmp_path: Path) -> None:
    prompts = Prompts(write_model_dir(tmp_path))
    messages = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "I say"}]
    tokens = prompts.chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompts.tokenizer.decode(tokens, skip_special_tokens=False).endswith("<|assistant|>I say")


def test_a_template_cannot_reach_python_internals(tmp_path: Path) -> None:
    prompts = Prompts(write_model_dir(tmp_path, chat_template="{{ messages.__class__.__mro__ }}"))
    with pytest.raises(BadRequest):
        prompts.chat([{"role": "user", "content": "x"}])


def test_a_directory_that_is_no_model_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Prompts(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Prompts(tmp_path)


@pytest.mark.parametrize(
    ("generation", "reason"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0: Expected `float` >= 0.01"),
        ({"max_new_tokens": -5}, "max_new_tokens is -5: Expected `int` >= 1"),
        ({"top_p": 1.5}, "top_p is 1.5: Expected `float` <= 1.0"),
        ({"temperature": "hot"}, "temperature is 'hot': Expected `float | null`, got `str`"),
    ],
)
def test_defaults_that_no_request_may_have_end_the_start(tmp_path: Path, generation: dict[str, Any], reason: str) -> None:
    model_dir = write_model_dir(tmp_path, **generation)
    with pytest.raises(ConfigError) as refused:
        Prompts(model_dir)
    assert str(refused.value) == f"--model: generation_config.json: {reason}"


# ---- long texts


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    prompts = Prompts(write_model_dir(tmp_path))
    began_s = now_s()
    with pytest.raises(PromptTooLong) as refused:
        prompts.texts(["ab" * (16 << 20)], longest=256)
    assert refused.value.param == "prompt"
    with pytest.raises(PromptTooLong) as refused:
        prompts.chat([{"role": "user", "content": "ab" * (4 << 20)}], longest=256)
    assert refused.value.param == "messages"
    assert now_s() - began_s < 5, "some seconds per MiB would be tokenization"


def test_what_fits_is_never_refused_for_its_length(tmp_path: Path) -> None:
    kinds = [byte_level(), sentence_piece(), metaspace(), word_piece()]
    composing = byte_level()
    composing.normalizer = normalizers.NFC()
    for i, tokenizer in enumerate([*kinds, composing]):
        prompts = Prompts(write_model_dir(tmp_path / str(i), tokenizer))
        longest_token = max(tokenizer.get_vocab(), key=len)
        texts = [
            "hello",
            "日本 added" * 50,
            "x" * 300,
            " " * 300,
            "\u03b1\u0313\u0300\u0345" * 40,
            tokenizer.decode([9]) * 9,
            longest_token * 9,
        ]
        for text in texts:
            [tokens] = prompts.texts([text])
            assert [tokens] == prompts.texts([text], longest=len(tokens)), (i, text[:20])
    prompts = Prompts(write_model_dir(tmp_path / "trimmed"))
    padded = [{"role": "user", "content": " " * 100_000 + "hi"}]  # the template trims
    assert len(prompts.chat(padded, longest=256)) < 256


def test_a_count_is_bounded_in_characters(tmp_path: Path) -> None:
    prompts = Prompts(write_model_dir(tmp_path))
    with pytest.raises(BadRequest, match="at most"):
        prompts.texts(["x" * (prompt.COUNTED_CHARS_MAX + 1)], counting=True)


def test_a_chat_with_tools_is_rendered_by_the_template_for_tools(tmp_path: Path) -> None:
    named = {"default": "hello{{ messages[0].content }}", "tool_use": "{{ tools | length }}{{ messages[0].content }}"}
    prompts = Prompts(write_model_dir(tmp_path, chat_template=named))
    hello, tools = [{"role": "user", "content": " world"}], {"tools": [{"type": "function"}]}
    assert prompts.chat(hello) == prompts.texts(["hello world"])[0]
    assert prompts.chat(hello, variables=tools) == prompts.texts(["1 world"])[0]


# ---- --chat-template


def chosen(tmp_path: Path, given: str, *, tools: bool = False, template: Any = "own") -> str:
    model_dir = write_model_dir(tmp_path, chat_template=template)
    return Prompts(model_dir, given).templates.chosen(tools=tools).render([{"role": "user", "content": "hi"}])


def test_the_chat_template_can_be_a_file_a_text_or_a_name_of_the_model_or_of_motet(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("file{{ messages[0].content }}")
    named = [{"name": "default", "template": "own"}, {"name": "rag", "template": "rag"}, {"name": "tool_use", "template": "x"}]
    assert chosen(tmp_path / "m", str(tmp_path / "mine.jinja")) == "filehi"
    assert chosen(tmp_path / "m", "{{ bos_token }}text") == "<s>text"
    assert chosen(tmp_path / "m", "chatml", template="").startswith("<|im_start|>user\nhi<|im_end|>")
    assert chosen(tmp_path / "m", "rag", template=named, tools=True) == "rag", "for every request, as in transformers"
    assert chosen(tmp_path / "m", "", template=named, tools=True) == "x"


def test_a_chat_template_that_is_nothing_of_these_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template: chatlm: neither one of chatml, default, llama3 nor a file"):
        chosen(tmp_path, "chatlm")
    with pytest.raises(ConfigError, match=r"--chat-template: the given text does not compile: line 1"):
        chosen(tmp_path, "{% if %}")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json cannot be read"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json is not a JSON object"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is no JSON"),
        ("tokenizer_config.json", '{"eos_token": 5}', r"tokenizer_config\.json: eos_token: expected a token's text .* not 5"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', r"added_tokens_decoder: expected an object, not \[\]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}', r"expected a token id, not 'x'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": "a", "lstrip": 1}}}', r"lstrip must be true or"),
        ("tokenizer_config.json", '{"extra_special_tokens": "a"}', r"extra_special_tokens: expected a list or an object"),
        ("special_tokens_map.json", '{"eos_token": {"content": 1}}', r"special_tokens_map\.json: eos_token: expected"),
        ("added_tokens.json", '{"a": null}', r"added_tokens\.json: a: expected a token id, not None"),
        ("chat_template.json", '{"chat_template": 1}', r"chat_template\.json: chat_template: expected a text"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_its_name(tmp_path: Path, name: str, content: str, told: str) -> None:
    (write_model_dir(tmp_path, chat_template="") / name).write_text(content)
    with pytest.raises(ConfigError, match=rf"--model: {tmp_path}: .*{told}"):
        Prompts(tmp_path)
