"""Plug-ins: Python modules that add to Motet's tables when they are imported (docs/extending.md).

`--plugins` names them: `my_package.policies`, or a file `./my_policies.py`. They are the operator's own code and may
do whatever Motet may.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path


class PluginError(Exception):
    """A plug-in that cannot be imported; the message names it and the reason."""


def import_plugins(listed: str) -> None:
    """Import the modules of a comma-separated list, each once. Raises PluginError."""
    for name in filter(None, (one.strip() for one in listed.split(","))):
        try:
            if name.endswith(".py"):
                _import_file(Path(name).resolve())
            else:
                if os.getcwd() not in sys.path:
                    sys.path.append(os.getcwd())
                importlib.import_module(name)
        except Exception as error:  # whatever a module can raise
            raise PluginError(f"{name}: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    """Import a file as a module that has the file's name, so that others can import what it defines."""
    name = path.stem
    if (known := sys.modules.get(name)) is not None:
        if Path(known.__file__ or "") != path:
            raise ImportError(f"there is a module {name} already; give the file another name")
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
