"""The answer of a service that does not do what it was asked for."""

from __future__ import annotations

import msgspec

from motet.shared.errors import ErrorInfo


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """The request was refused, and why. `shared.errors.from_info` turns it into an exception."""

    error: ErrorInfo
