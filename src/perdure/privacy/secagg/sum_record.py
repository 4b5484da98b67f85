"""What a client did in one secure sum, so that it never contradicts itself."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.core.trees import Tree
from perdure.privacy.secagg.messages import SumRequest
from perdure.privacy.secagg.wire import decode, encode


@dataclass
class SumRecord:
    """What a client did in one sum."""

    request: SumRequest
    """The request for the sum."""
    row_digest: bytes
    """Digest of the masked row that was sent: the same masks must not cover two rows. Empty if the
    client declined."""
    survivors: set[int]
    """Clients that were left at the last request."""
    unmasked: tuple[int, ...] | None = None
    """Clients for whose self-masks this client gave its shares. If None, it gave none."""

    def to_tree(self) -> Tree:
        """Return the record as a tree that can be saved."""
        return {
            "request": encode(self.request).hex(),
            "row_digest": self.row_digest.hex(),
            "survivors": sorted(self.survivors),
            "unmasked": None if self.unmasked is None else list(self.unmasked),
        }

    @classmethod
    def from_tree(cls, tree: Tree) -> SumRecord:
        """Restore a record from `to_tree`."""
        request, unmasked = decode(bytes.fromhex(tree["request"]), SumRequest), tree["unmasked"]
        unmasked = None if unmasked is None else tuple(unmasked)
        return cls(request, bytes.fromhex(tree["row_digest"]), set(tree["survivors"]), unmasked)
