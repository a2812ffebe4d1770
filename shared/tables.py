"""Tables of what an option can name, such as scheduling policies. Plug-ins add to them (docs/extending.md)."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class UnknownName(ValueError):
    """A name that a table does not have."""


class Table(dict[str, T]):
    """Things by name. `Annotated[str, TABLE, Meta(...)]` is an option that names one of them."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # a table is a part of annotations, which are hashed

    def add(self, name: str, thing: T) -> None:
        """Add a thing under a name of its own. Raises ValueError if another one has the name."""
        if self.setdefault(name, thing) is not thing:
            raise ValueError(f"{name!r} is the name of another one")

    def named(self, name: str) -> T:
        """The thing with this name. Raises UnknownName, which lists the names."""
        if name not in self:
            raise UnknownName(f"{name!r} is not one of {', '.join(self)} (modules given as --plugins may add others)")
        return self[name]
