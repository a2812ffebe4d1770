"""Chat templates are chosen and rendered as transformers' `apply_chat_template` does with the same files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from motet.shared.chat_templates import SHIPPED, ChatTemplates
from motet.shared.errors import BadRequest
from motet.shared.tokenizer import UnusableFile, read_texts
from tests.services.gateway.support_tokenizers import CHAT_TEMPLATE, write_model_dir

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedTokenizerFast

PLAIN = "D{{ bos_token }}{{ messages[0].content }}"
TOOL = "T{{ tools | tojson }}{{ messages[0].content }}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
HELLO = [{"role": "user", "content": "hi"}]
LISTED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOL}]
DIRECTORIES: dict[str, dict[str, Any]] = {
    "a text": {"tokenizer_config.json": PLAIN},
    "a list": {"tokenizer_config.json": LISTED},
    "a list that names one twice": {"tokenizer_config.json": [{"name": "default", "template": "x"}, *LISTED]},
    "a mapping": {"tokenizer_config.json": {"tool_use": TOOL, "default": PLAIN}},
    "a file": {"chat_template.jinja": PLAIN},
    "a file wins over the list": {"chat_template.jinja": "file{{ tools }}", "tokenizer_config.json": LISTED},
    "files": {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": TOOL},
    "files beside the list": {
        "chat_template.jinja": PLAIN,
        "additional_chat_templates/tool_use.jinja": "own" + TOOL,
        "additional_chat_templates/rag.jinja": "rag",
        "tokenizer_config.json": LISTED,
    },
}


def write(directory: Path, files: dict[str, Any]) -> Path:
    """A model directory. What is for a JSON file becomes the value of `chat_template` there."""
    write_model_dir(directory, chat_template="")
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".json"):
            before = json.loads(path.read_text()) if path.exists() else {}
            content = json.dumps(before | {"chat_template": content})
        path.write_text(content)
    return directory


def templates(directory: Path) -> ChatTemplates:
    return ChatTemplates.of(read_texts(directory))


def reference(directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PreTrainedTokenizerFast.from_pretrained(str(directory))


def rendered(
    directory: Path, tools: list[dict[str, Any]] | None = None, messages: list[dict[str, Any]] = HELLO, **more: Any
) -> str:
    variables = {"tools": tools} if tools else {}
    return templates(directory).chosen(tools=bool(tools)).render(messages, variables=variables, **more)


@pytest.mark.parametrize("files", DIRECTORIES.values(), ids=DIRECTORIES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
def test_the_template_of_a_request_is_the_one_that_transformers_takes(tmp_path: Path, files: Any, tools: Any) -> None:
    directory = write(tmp_path, files)
    expected = reference(directory).apply_chat_template(HELLO, tools=tools, tokenize=False, add_generation_prompt=True)
    assert rendered(directory, tools) == expected


def test_a_processor_s_template_wins_over_the_tokenizer_s(tmp_path: Path) -> None:
    assert rendered(write(tmp_path, {"chat_template.json": "json", "tokenizer_config.json": LISTED})) == "json"


def test_files_without_a_default_one_leave_the_configured_default(tmp_path: Path) -> None:
    directory = write(tmp_path, {"additional_chat_templates/tool_use.jinja": TOOL, "tokenizer_config.json": "configured"})
    assert rendered(directory) == "configured"
    assert rendered(directory, TOOLS).startswith("T[")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"tokenizer_config.json": 5}, r"tokenizer_config\.json: chat_template: expected a text, a list .*, not 5"),
        ({"tokenizer_config.json": ["x"]}, r"chat_template\[0\]: expected an object with name and template"),
        ({"tokenizer_config.json": [{"name": "default"}]}, r"chat_template\[0\]"),
        ({"tokenizer_config.json": {"default": 1}}, r"'default' must be a name and have a text"),
        ({"tokenizer_config.json": [{"name": 1, "template": "x"}]}, r"1 must be a name"),
        ({"tokenizer_config.json": "{% if %}"}, r"tokenizer_config\.json: chat_template does not compile: line 1"),
        ({"chat_template.jinja": "a\n{{ b"}, r"^chat_template\.jinja does not compile: line 2"),
        ({"additional_chat_templates/rag.jinja": "{% for %}"}, r"^additional_chat_templates/rag\.jinja does not compile"),
    ],
)
def test_a_malformed_template_is_refused_by_the_name_of_its_file(tmp_path: Path, files: Any, told: str) -> None:
    with pytest.raises(UnusableFile, match=told):
        templates(write(tmp_path, files))


def test_what_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    (write(tmp_path, {}) / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(UnusableFile, match=r"^chat_template\.jinja cannot be read"):
        templates(tmp_path)


def test_templates_without_a_default_serve_what_they_are_for_and_say_what_is_missing(tmp_path: Path) -> None:
    found = templates(write(tmp_path, {"tokenizer_config.json": LISTED[1:]}))
    assert found.chosen(tools=True).render(HELLO, variables={"tools": TOOLS}).startswith("T[")
    with pytest.raises(BadRequest, match=r"\(tool_use\) is named default: .*--chat-template"):
        found.chosen()


# ---- rendering


MESSAGES: dict[str, list[dict[str, Any]]] = {
    "null values": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": None, "name": "b"}],
    "reasoning": [{"role": "assistant", "content": "a", "reasoning": "because"}],
    "reasoning_content": [{"role": "assistant", "content": "a", "reasoning_content": "because"}],
    "thinking": [{"role": "assistant", "content": "a", "thinking": "because"}],
}


@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
def test_messages_reach_the_template_as_in_transformers(tmp_path: Path, messages: list[dict[str, Any]]) -> None:
    directory = write(tmp_path, {"chat_template.jinja": "{% for m in messages %}{{ m | dictsort | tojson }}{% endfor %}"})
    expected = reference(directory).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered(directory, messages=messages) == expected


@pytest.mark.parametrize("final", ["I say", "I say ", " I say\n", "user", "", "a</s>"])
@pytest.mark.parametrize(
    "template", [CHAT_TEMPLATE, CHAT_TEMPLATE.replace(" | trim", ""), CHAT_TEMPLATE + "{{ messages[-1].content }}"]
)
def test_a_final_message_is_continued_as_in_transformers(tmp_path: Path, template: str, final: str) -> None:
    directory = write(tmp_path, {"chat_template.jinja": template})
    messages = [{"role": "user", "content": "user"}, {"role": "assistant", "content": final}]
    expected = reference(directory).apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert rendered(directory, messages=messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_special_tokens_of_the_model_s_own_names_are_variables(tmp_path: Path) -> None:
    directory = write(
        tmp_path, {"chat_template.jinja": "{{ image_token }}{{ boi_token }}{{ bos_token }}{{ messages[0].content }}"}
    )
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"image_token": "<image>", "extra_special_tokens": {"boi_token": "<boi>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert rendered(directory) == "<image><boi><s>hi"
    assert rendered(directory) == reference(directory).apply_chat_template(HELLO, tokenize=False)


ROLES = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"


def test_the_role_developer_is_shown_as_system_to_a_template_that_does_not_name_it(tmp_path: Path) -> None:
    directory = write(tmp_path, {"chat_template.jinja": ROLES})
    messages = [{"role": "developer", "content": "be brief"}, *HELLO]
    assert rendered(directory, messages=messages) == "system=be brief;user=hi;"
    late = [{"role": "system", "content": "be kind"}, *HELLO, {"role": "developer", "content": "be brief"}]
    assert rendered(directory, messages=late) == "system=be kind\n\nbe brief;user=hi;", "one system message, in front"
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert rendered(directory, messages=parts) == "system=[{'type': 'text', 'text': 'a\\nb'}];"
    assert messages[0]["role"] == "developer", "what the request says is unchanged"


def test_a_template_that_names_the_role_developer_sees_it(tmp_path: Path) -> None:
    directory = write(tmp_path, {"chat_template.jinja": "{% if messages[0].role == 'developer' %}!{% endif %}" + ROLES})
    assert rendered(directory, messages=[{"role": "developer", "content": "x"}]) == "!developer=x;"


def test_system_messages_alone_stay_where_they_are(tmp_path: Path) -> None:
    directory = write(tmp_path, {"chat_template.jinja": ROLES})
    messages = [{"role": "system", "content": "a"}, *HELLO, {"role": "system", "content": "b"}]
    assert rendered(directory, messages=messages) == "system=a;user=hi;system=b;"


def test_the_shipped_templates_write_their_formats(tmp_path: Path) -> None:
    model = templates(write(tmp_path, {}))
    chat = [{"role": "system", "content": "be brief"}, *HELLO]
    written = {name: model.only(source, name).chosen().render(chat) for name, source in SHIPPED.items()}
    assert written == {
        "chatml": "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    }


def test_the_variables_that_a_template_reads_are_known(tmp_path: Path) -> None:
    template = templates(
        write(tmp_path, {"chat_template.jinja": "{{ messages }}{% if enable_thinking %}x{% endif %}"})
    ).chosen()
    assert "enable_thinking" in template.reads
    assert "documents" not in template.reads
