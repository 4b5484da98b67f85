"""Count the uploads that clients made twice at one place of a run, for the accounting of noise.

A server that resumes from a checkpoint repeats requests. Nodes reply to the same request with the
same bytes; only a request that differs from the one before is another release of noisy values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from perdure.contract.upload_collector import FailedUpload
from perdure.core.trees import Tree
from perdure.flower.node_replies import Reply
from perdure.flower.sent_replies import MOST_RELEASES


class ExtraReleases:
    """By client, the uploads beyond one per round and exchange."""

    def __init__(self) -> None:
        self._extra: Counter[str] = Counter()

    def note(self, replies: Mapping[int, Reply], clients: Mapping[int, list[int]]) -> None:
        """Add what nodes say about the uploads in their replies.

        Args:
            replies: The replies by node.
            clients: By node the clients that were asked; what it says about others does not count.
        """
        for node, reply in replies.items():
            counts = {} if isinstance(reply, FailedUpload) else reply.get("releases", {})
            for client in clients[node] if isinstance(counts, dict) else ():
                count = counts.get(str(client))
                if type(count) is int and 1 < count <= MOST_RELEASES:
                    self._extra[str(client)] += count - 1

    def to_tree(self) -> Tree:
        """Return the counts by client, for the checkpoint."""
        return dict(self._extra)

    def restore(self, tree: Tree) -> None:
        """Restore the counts."""
        self._extra = Counter(tree)
