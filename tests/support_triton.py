"""Makes Triton's interpreter quicker: it prepares its language once for each launch.

The interpreter replaces some hundred functions of `triton.language` when a kernel begins, and again whenever the kernel calls
a function of its own or of Triton, although they have been replaced. That takes a third of the time of our kernels.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replace: Any = interpreter._patch_lang  # private: there is no setting for it
_replaced: set[int] = set()  # the modules in which functions are replaced now


def _replace_once(function: Any) -> Any:
    modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
    if modules <= _replaced:
        return None
    scope = _replace(function)
    if not _replaced:  # a launch begins; its end restores the functions
        restore = scope.restore

        def restored() -> None:
            _replaced.clear()
            restore()

        scope.restore = restored
    _replaced.update(modules)
    return scope


def replace_once_per_launch() -> None:
    """From now on, in this process."""
    interpreter._patch_lang = _replace_once  # private: as above
