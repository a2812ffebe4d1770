"""The adapters of --adapters-dir that the registry refused (one record of KV `motet_adapters`), for every gateway to tell.

The registry replaces the record whenever it has read the directory, and takes a name out when an adapter of that name is
registered later. The record lists as many adapters as fit into `LIST_BYTES` and counts the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

KEY = "refused"
LIST_BYTES = 48 << 10  # a record of the bucket holds 64 KiB
NAME_CHARS, REASON_CHARS = 200, 300


class RefusedAdapter(msgspec.Struct, frozen=True):
    """An adapter that is not served: its name as a path below the directory, and the reason in one line."""

    name: str
    reason: str


class RefusedAdapters(msgspec.Struct, frozen=True, kw_only=True):
    """The first refused adapters by name, and how many there are in all."""

    total: int = 0
    adapters: tuple[RefusedAdapter, ...] = ()

    @property
    def unlisted(self) -> int:
        return self.total - len(self.adapters)

    def reason(self, name: str) -> str | None:
        """Why the adapter `name` was refused; None if it was not, or is not listed."""
        return next((one.reason for one in self.adapters if one.name == name), None)

    def without(self, name: str) -> RefusedAdapters:
        """The record after an adapter of this name has been registered."""
        left = tuple(one for one in self.adapters if one.name != name)
        return RefusedAdapters(total=self.total - len(self.adapters) + len(left), adapters=left)


def refused(found: Iterable[tuple[str, str]]) -> RefusedAdapters:
    """A record of (name, reason) pairs. Long texts are cut; control characters become spaces."""
    listed, total, size = [], 0, 0
    for name, reason in sorted(found):
        total += 1
        one = RefusedAdapter(_line(name, NAME_CHARS), _line(reason, REASON_CHARS))
        size += len(msgspec.json.encode(one)) + 1
        if size <= LIST_BYTES:
            listed.append(one)
    return RefusedAdapters(total=total, adapters=tuple(listed))


def _line(text: str, chars: int) -> str:
    """`text` on one line, of valid characters, cut at `chars`."""
    clean = " ".join("".join(c if c.isprintable() else " " for c in text.encode(errors="replace").decode()).split())
    return clean if len(clean) <= chars else clean[: chars - 1] + "…"
