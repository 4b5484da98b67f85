"""Objects as keys, compared by identity."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ById(Generic[T]):
    """A value that is equal to itself alone, whatever its own comparison says; it is kept alive."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value
