"""What can go wrong within a secure sum."""

from __future__ import annotations


class MalformedMessage(ValueError):
    """A message that is damaged, of another round, or not what the protocol has at this point."""


class UnsafeRequest(ValueError):
    """A participant will not answer, because the answer would reveal more than a sum."""


class BelowThreshold(RuntimeError):
    """Fewer clients are left than the threshold: nothing can be opened, the round is lost."""
