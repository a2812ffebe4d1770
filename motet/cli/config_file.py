"""Options from a YAML file: a mapping of option names to values. Every error names the file, the line and what is wrong.

model: ./llama            # an option's name as on the command line, with - or _
max-running: 128
tenants: [acme, umbrella] # the same as "acme,umbrella"
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from motet.shared.config import PLUGINS, ConfigError, Field

MAX_BYTES = 1 << 20


def read_options(path: Path, options: Mapping[str, Field]) -> dict[str, Any]:
    """The values in the file `path` by option name. Raises ConfigError for what is no option or does not fit."""
    try:
        with path.open("rb") as source:
            text = source.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config: {path}: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"--config: {path} has more than {MAX_BYTES} bytes")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:{_line(root)}: expected lines `option: value`")
    values: dict[str, Any] = {}
    for key, value in sorted(root.value, key=lambda line: line[0].value != PLUGINS):  # the others may name what they add
        where = f"{path}:{_line(key)}"
        option = _named(key, options, where)
        if option.name in values:
            raise ConfigError(f"{where}: {key.value} is given twice")
        word = _text(value, option, where)
        try:
            read = option.read(word)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        values[option.name] = read if option.type is bool else word  # as from the command line
    return values


def _named(key: yaml.Node, options: Mapping[str, Field], where: str) -> Field:
    name = str(key.value).replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""
    if (option := options.get(name)) is not None:
        return option
    if not name:
        raise ConfigError(f"{where}: expected the name of an option")
    close = get_close_matches(name, options, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; `motet up --help-all` lists them"
    raise ConfigError(f"{where}: {key.value} is not an option{hint}")


def _text(value: yaml.Node, option: Field, where: str) -> str:
    """The value as on the command line."""
    if isinstance(value, yaml.SequenceNode) and option.type is str and all(isinstance(n, yaml.ScalarNode) for n in value.value):
        return ",".join(str(node.value) for node in value.value)
    if not isinstance(value, yaml.ScalarNode):
        raise ConfigError(f"{where}: {option.name}: expected a single value; all options stand at the top level")
    if value.tag == "tag:yaml.org,2002:bool" and option.type is bool:
        return "true" if yaml.SafeLoader.bool_values[value.value.lower()] else "false"
    return "" if value.tag == "tag:yaml.org,2002:null" else str(value.value)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
