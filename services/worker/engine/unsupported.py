"""The error for a checkpoint that the native engine does not run."""

from __future__ import annotations

from motet.shared.config import ConfigError


class UnsupportedModel(ConfigError):
    """A checkpoint the native engine does not run; the message names the key or file and the reason."""
