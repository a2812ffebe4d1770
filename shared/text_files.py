"""The names of the text files beside a model's or an adapter's weights. Imports nothing: processes that only unpack need it."""

from __future__ import annotations

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_MAP_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
TEMPLATES_DIR = "additional_chat_templates"
GENERATION_FILE = "generation_config.json"
TEXT_FILES = (CONFIG_FILE, SPECIAL_MAP_FILE, ADDED_FILE, "chat_template.jinja", "chat_template.json", GENERATION_FILE)
"""The files of an adapter that are read beside its configuration and weights, and templates in `additional_chat_templates`."""
WITHOUT = "register it with chat=false (motet adapters add --no-chat) to serve it with the base model's template and tokens"
"""The end of a refusal for one of these files."""


def is_text_file(name: str) -> bool:
    """Whether a file of this path, relative to the adapter's directory, is one that is read."""
    folder, _, file = name.rpartition("/")
    return name in TEXT_FILES or (folder == TEMPLATES_DIR and file.endswith(".jinja"))
