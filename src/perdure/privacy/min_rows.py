"""The smallest number of rows about which a client sends anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.config.root import PrivacyConfig
from perdure.config.section import NonNegativeInt
from perdure.core.errors import bad_value
from perdure.data.streams.stream import Stream
from perdure.privacy.mechanism import Mechanism

if TYPE_CHECKING:
    from perdure.privacy.chain import OwnerPolicy

MIN_ROWS = 8
"""Rows of which a real node sends anything, unless its owner says otherwise."""


class MinRowsKeys(PrivacyConfig):
    """The key of `privacy` for the smallest number of rows."""

    min_rows: NonNegativeInt | None = None
    """Rows of a task that a client must have to send anything in it, and rows of a class that it
    must have to send anything about the class. Default: 0 in a simulation, 8 on real nodes, whose
    owners may set more or less (`policy.min_rows` of node.yaml); a config can only ask for
    more."""


class MinRows(Mechanism):
    """Clients with few rows of a task hold nothing of it, and so send nothing.

    Methods that send statistics of classes leave out those with fewer rows (`Client.min_rows`).
    """

    key = "min_rows"
    keys = MinRowsKeys
    privacy: MinRowsKeys
    draws = hides_losses = False

    @property
    def rows(self) -> int:
        """The smallest number of rows."""
        return self.privacy.min_rows or 0

    def limit_rows(self, stream: Stream, is_whole: bool) -> Stream:
        """Return the stream in which clients with fewer rows of a task hold nothing of it.

        Raises:
            UserError: No client has that many rows of some task.

        """
        for task in stream.tasks[: stream.known_tasks] if is_whole else ():
            largest = int(task.partition.sizes.max())
            if largest < self.rows:
                raise bad_value(
                    "privacy.min_rows", self.rows,
                    f"at most {largest}, the rows of the largest client of task {task.index + 1}",
                )  # fmt: skip
        return stream.with_min_rows(self.rows)

    def on_node(self, policy: OwnerPolicy) -> dict[str, Any]:
        """Return what the owner of a node or the run asks for, whichever is more."""
        return {"min_rows": max(policy.min_rows, self.rows)}
