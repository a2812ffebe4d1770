"""The 404 for a name that is not served: why not, where that is known, and what it may have meant."""

from __future__ import annotations

from difflib import get_close_matches

from motet.shared.adapter_watch import AdapterWatch
from motet.shared.errors import ModelNotFound

COMPARED = 256  # names; comparing more would take the event loop's time
COMPARED_CHARS = 64
ALIKE = 0.7  # of difflib's ratio


def unknown_model(name: str, adapters: AdapterWatch, tenant: str, base_model: str, *, param: str) -> ModelNotFound:
    """The error for the model `name`, which is neither the base model nor an adapter of it that `tenant` may use."""
    own = name.removeprefix(base_model + ":")
    return ModelNotFound(f"The model `{name}` does not exist.{_why(own, adapters, tenant, base_model)}", param=param)


def refusal(name: str, adapters: AdapterWatch) -> str:
    """ " It was refused: ..." for an adapter of --adapters-dir that is not served, else ""."""
    reason = adapters.refused.reason(name)
    return "" if reason is None else f" The adapter of this name in --adapters-dir was refused: {reason}"


def _why(name: str, adapters: AdapterWatch, tenant: str, base_model: str) -> str:
    if (info := adapters.resolve(name, tenant)) is not None:
        return f" The adapter belongs to the base model {info.version.base_model}; this is {base_model}."
    if reason := refusal(name, adapters):
        return reason
    if adapters.names() <= COMPARED:
        names = [base_model, *(info.entry.name for info in adapters.visible(tenant))]
        if close := get_close_matches(name[:COMPARED_CHARS], names, n=1, cutoff=ALIKE):
            return f" Did you mean `{close[0]}`? GET /v1/models lists what is served."
    if unlisted := adapters.refused.unlisted:
        return f" It may be one of {unlisted:,} adapters of --adapters-dir whose refusals only the registry's log has."
    return " GET /v1/models lists what is served."
