"""Wait for nodes that are missing for the quorum, for a limited time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from perdure.config import FederationConfig
from perdure.training.participation import missing_nodes

log = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
"""Seconds until missing nodes are asked again, which double every time."""


class Waiting:
    """Pauses between requests, until a time is over that begins with the first pause."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._pause = seconds, _FIRST_PAUSE
        self._end: float | None = None

    def pause(self, reasons: Mapping[int, str]) -> bool:
        """Pause, and return whether to ask again; False if the time is over.

        Args:
            reasons: Why nodes are missing, by node.
        """
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        if now >= self._end:
            return False
        for node, reason in reasons.items():
            log.warning("waiting for node-%d: %s", node, reason)
        time.sleep(min(self._pause, self._end - now))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True


def ask_until_quorum(
    federation: FederationConfig | None,
    nodes: list[int],
    ask: Callable[[list[int]], dict[int, str]],
) -> dict[int, str]:
    """Ask nodes, and those that fail again as long as the quorum is not reached.

    Args:
        federation: The `federation` section. If None, nobody is asked again.
        nodes: The nodes to ask.
        ask: Asks nodes and returns why nodes fail, of those asked so far.

    Returns:
        Why nodes failed to the last, by node.
    """
    failed = ask(nodes)
    waiting = Waiting(federation.wait if federation is not None else 0.0)
    while missing_nodes(federation, nodes, failed) and waiting.pause(failed):
        failed = ask(sorted(failed))
    return failed
