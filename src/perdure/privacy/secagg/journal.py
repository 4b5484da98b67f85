"""How a server reaches the clients of secure sums, and the sums that it asked for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from perdure.core.documents import json_value
from perdure.core.errors import RunError
from perdure.core.received import read_integer
from perdure.privacy.secagg.messages import SumRequest, Survivors, decode, encode

# ---- How a server reaches the clients of secure sums, and how many of them it needs

MIN_CLIENTS = 3
"""Smallest number of clients in a secure sum, at its start and when it is opened: of two, each
could read the other off the sum."""


@runtime_checkable
class SecAggTransport(Protocol):
    """The way to the clients of secure sums. The engine of a real federation is one."""

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """Return these clients' public keys for a task; clients that did not reply are absent."""
        ...

    def announce(self, sum_request: bytes) -> None:
        """Set the request that the uploads of the next exchange belong to."""
        ...

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        """Send each client its request, and return the answers that arrived."""
        ...


def min_survivors(count: int, threshold: float) -> int:
    """Return how many clients must be left for a sum to be opened."""
    return max(MIN_CLIENTS, count // 2 + 1, math.ceil(threshold * count - 1e-9))


# ---- The secure sums that a server asked for, stored so that a restarted server repeats them
#
# A client takes part in one sum of a round, and helps to open it for one set of clients: the
# difference of two sums could be one client's upload. So a server that dies within a round, or goes
# back to an earlier checkpoint, must ask for the same sum as before, among the same clients.

Position = tuple[int, int, int]
"""Task, round and exchange."""
_LARGEST = 1_000_000
"""Bound on the numbers of clients, tasks, rounds and exchanges."""


@dataclass(frozen=True)
class StartedSum:
    """A sum that clients were asked for."""

    request: SumRequest
    """The request that they got."""
    sampled: tuple[int, ...]
    """The clients of the attempt, with those that sent no key."""
    excluded: tuple[int, ...] = ()
    """Clients that uploaded to sums of earlier attempts, and to no other one."""
    known: Survivors | None = None
    """The clients that are left, as the server has sent it to them. If None, it has not."""


class SumJournal:
    """The last sum at each position of a run; in memory, until `store_in` is called."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._sums: dict[Position, StartedSum] = {}

    def store_in(self, path: Path) -> None:
        """Read the sums of a file, to which all further ones are appended.

        Raises:
            RunError: A line of the file is not one of a journal.

        """
        data = path.read_bytes() if path.is_file() else b""
        *lines, incomplete = data.split(b"\n")
        if incomplete:  # the process died while it wrote the line, before anything was sent
            os.truncate(path, len(data) - len(incomplete))
        for number, line in enumerate(lines):
            try:
                self._read(json_value(line))
            except (ValueError, KeyError, TypeError):
                raise RunError(f"{path}: line {number + 1} is not a secure sum") from None
        self._path = path

    def at(self, position: Position) -> StartedSum | None:
        """Return the last sum that was asked for at a position, or None."""
        return self._sums.get(position)

    def add(self, started: StartedSum) -> None:
        """Store a new sum before its request is sent."""
        position, request = started.request.session.position, encode(started.request).hex()
        self._sums[position] = started
        clients = {"sampled": started.sampled, "excluded": started.excluded}
        self._append({"position": position, "request": request, **clients})

    def add_survivors(self, position: Position, known: Survivors) -> None:
        """Store which clients are left in a sum, before they receive that."""
        started = self._sums[position]
        if started.known != known:
            self._sums[position] = replace(started, known=known)
            self._append({"position": position, "survivors": known.clients, "final": known.final})

    def _read(self, line: dict[str, Any]) -> None:
        task, round_index, exchange = _integers(line["position"])
        position = (task, round_index, exchange)
        if "request" in line:
            request = decode(bytes.fromhex(line["request"]), SumRequest)
            started = StartedSum(request, _integers(line["sampled"]), _integers(line["excluded"]))
        else:
            known = Survivors(_integers(line["survivors"]), line["final"] is True)
            started = replace(self._sums[position], known=known)
        self._sums[position] = started

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line, and wait until it is on the disk."""
        if self._path is None:
            return
        with self._path.open("ab") as file:
            file.write(json.dumps(line).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _integers(values: list[Any]) -> tuple[int, ...]:
    """Return numbers of clients, or a position; ValueError if a value is something else."""
    return tuple(read_integer("number", value, -_LARGEST, _LARGEST) for value in values)
