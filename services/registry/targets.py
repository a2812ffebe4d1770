"""Which modules an adapter's configuration selects, as PEFT decides when it loads the adapter.

PEFT (`peft.tuners.tuners_utils.check_target_module_exists`) makes LoRA layers for the modules that the configuration selects.
Tensors of other modules find no layer and have no effect, so they are left out here too.

Paths are those of the file: names in a configuration were written for the same model as the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from motet.services.registry.patterns import fully, layer_numbers
from motet.services.registry.peft_config import PeftConfig
from motet.shared.errors import InvalidAdapter

ALL_LINEAR = "all-linear"
DEFAULT_TARGETS = ("q_proj", "v_proj")
DEFAULT_MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""Models for which PEFT takes `DEFAULT_TARGETS` when a configuration names no targets."""
CONDENSED_FROM = 20  # PEFT shortens lists of this length to ends of paths where it can
_NOT_LINEAR = ("embed_tokens", "lm_head")  # "all-linear" leaves the output layer out


def selected(config: PeftConfig, paths: Sequence[str], model_type: str) -> set[str]:
    """The `paths` of modules that the configuration selects. Blocks for a while where it holds expressions of a tenant.

    Raises InvalidAdapter, naming the key, for a configuration that PEFT cannot load or whose expressions cannot be matched.
    """
    excluded = config.exclude_modules or []
    if isinstance(excluded, str):
        out = fully("exclude_modules", excluded, paths)
    else:
        out = {path for path in paths if _is_named(path, set(excluded))}
    out |= {path for path in paths if _is_saved_whole(path, config.modules_to_save or ())}
    left = [path for path in paths if path not in out]
    targets = config.target_modules
    if targets is None:
        if model_type not in DEFAULT_MODELS:
            raise InvalidAdapter("target_modules is not set in adapter_config.json", param="target_modules")
        targets = list(DEFAULT_TARGETS)
    if isinstance(targets, str):
        if targets.lower() == ALL_LINEAR:
            return {path for path in left if not _is_named(path, _NOT_LINEAR)}
        return fully("target_modules", targets, left)
    return _listed(config, targets, left)


def _listed(config: PeftConfig, targets: Sequence[str], paths: Sequence[str]) -> set[str]:
    """A list of names: a full path is selected in any case, other matches only in `layers_to_transform`."""
    names = set(targets)
    full = names & set(paths)
    found = [path for path in paths if _is_named(path, names)]
    layers = config.layers_to_transform
    if layers is None or layers == []:
        return set(found)
    if full and len(names) >= CONDENSED_FROM:
        raise InvalidAdapter(
            f"layers_to_transform beside {CONDENSED_FROM} or more full paths in target_modules is ambiguous: PEFT may shorten "
            "the paths and then leaves out other layers; leave out one of the two keys",
            param="layers_to_transform",
        )
    patterns = config.layers_pattern or []
    numbers = layer_numbers("layers_pattern", [patterns] if isinstance(patterns, str) else patterns, found)
    wanted = {layers} if isinstance(layers, int) else set(layers)
    return full | {path for path in found if numbers.get(path, -1) in wanted}


def _is_named(path: str, names: Collection[str]) -> bool:
    """Whether one of `names` is the path or its end after a dot."""
    return path in names or any(path[at + 1 :] in names for at, char in enumerate(path) if char == ".")


def _is_saved_whole(path: str, modules: Sequence[str]) -> bool:
    """Whether the module lies in one of those that `modules_to_save` names (`embed_tokens`, `lm_head` or a path to them)."""
    return any(f".{module}." in f".{path}." for module in modules)
