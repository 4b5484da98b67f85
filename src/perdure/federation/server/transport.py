"""How the server reaches the nodes: over Flower's grid, with time limits."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from perdure.contract.uploads import FailedUpload
from perdure.core.received import one_line
from perdure.core.version import __version__
from perdure.federation.admin.folders import node_name, node_number

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3
RECONNECT_SECONDS = 15.0
"""Time to wait for a node that was connected before and is not now."""
_EXPIRY_SECONDS = 60
"""Time for which Flower stores a message beyond the timeout."""
_ABSENT = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
_BODY, _HEADER, _VERSION = "body", "header", "version"


class Transport(Protocol):
    """The way from the server to the nodes."""

    def send_and_receive(
        self, headers: Mapping[int, str], body: bytes, limit: int
    ) -> dict[int, bytes | FailedUpload]:
        """Send a request to each node, and return the replies by node."""
        ...


def make_content(header: str, body: bytes) -> RecordDict:
    """Return a header and a body as the content of a Flower message, with this version.

    The body is one array: Flower splits arrays into chunks, and sends equal chunks once.
    """
    array = Array("uint8", (len(body),), "bytes", body)
    return RecordDict(
        {
            _BODY: ArrayRecord({_BODY: array}),
            _HEADER: ConfigRecord({_HEADER: header, _VERSION: __version__}),
        }
    )


def other_version(content: RecordDict) -> str | None:
    """Return the version of the sender of a message if it is another one, else None."""
    record = content.config_records.get(_HEADER)
    version = "none" if record is None else str(record.get(_VERSION, "none"))
    return None if version == __version__ else one_line(version)


def read_content(content: RecordDict) -> tuple[str, bytes]:
    """Return the header and the body of a Flower message."""
    body = content.array_records[_BODY][_BODY].data
    return str(content.config_records[_HEADER][_HEADER]), body


class FlowerTransport:
    """Reaches the nodes over Flower's grid."""

    def __init__(self, grid: Grid, timeout: float) -> None:
        """Use a grid."""
        self._grid, self._timeout = grid, timeout
        self._requested: set[int] = set()

    def send_and_receive(
        self, headers: Mapping[int, str], body: bytes, limit: int
    ) -> dict[int, bytes | FailedUpload]:
        """Send a request to each node, and return the replies by node; see `Transport`.

        If no connected node replies and Flower reports one as gone, Flower probably listed the
        connections of an earlier start of the federation. The request is then repeated once, with
        the waiting time of nodes that are still starting.
        """
        replies, gone = self._attempt(headers, body, limit)
        if gone and not any(_has_replied(reply) for reply in replies.values()):
            log.warning("no node is connected any more; waiting for them once")
            self._requested.clear()
            replies, _ = self._attempt(headers, body, limit)
        return replies

    def _attempt(
        self, headers: Mapping[int, str], body: bytes, limit: int
    ) -> tuple[dict[int, bytes | FailedUpload], set[int]]:
        """Return the replies by node, and the nodes that got a request and are gone."""
        connected = self._wait_for_nodes(list(headers))
        replies: dict[int, bytes | FailedUpload] = {
            node: FailedUpload(node, f"{node_name(node)} is not connected")
            for node in headers
            if node not in connected
        }
        pending = self._send({node: headers[node] for node in connected}, connected, body)
        gone: set[int] = set()
        end = time.monotonic() + self._timeout
        while pending and time.monotonic() < end:
            for message in self._grid.pull_messages(list(pending)):
                node = pending.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    replies[node] = read_reply(node, message, limit)
                    gone |= {node} if _reports_absence(message) else set()
            if pending:
                time.sleep(POLL_SECONDS)
        late = f"no answer within {self._timeout:g} s"
        return replies | {node: FailedUpload(node, late) for node in pending.values()}, gone

    def _wait_for_nodes(self, wanted: list[int]) -> dict[int, int]:
        """Return Flower's ids of the connected nodes, after waiting for the others.

        A node that got no request before may still be starting, so it is waited for longer.
        """
        is_new = any(node not in self._requested for node in wanted)
        end = time.monotonic() + (self._timeout if is_new else RECONNECT_SECONDS)
        self._requested.update(wanted)
        while True:
            ids = {node_number(info.name): info.node_id for info in self._grid.get_nodes()}
            connected = {node: ids[node] for node in wanted if node in ids}
            if len(connected) == len(wanted) or time.monotonic() > end:
                return connected
            time.sleep(POLL_SECONDS)

    def _send(self, headers: dict[int, str], ids: dict[int, int], body: bytes) -> dict[str, int]:
        """Send the requests, and return the node of each message id."""
        ttl = self._timeout + _EXPIRY_SECONDS
        messages = [
            Message(make_content(header, body), ids[node], "train.work", ttl=ttl)
            for node, header in headers.items()
        ]
        message_ids = self._grid.push_messages(messages) if messages else []
        return {key: node for key, node in zip(message_ids, headers, strict=True) if key}


def _has_replied(reply: bytes | FailedUpload) -> bool:
    return not isinstance(reply, FailedUpload) or reply.answered


def _reports_absence(message: Message) -> bool:
    """Return whether Flower replied in place of a node that is gone."""
    return message.has_error() and message.error.code in _ABSENT


def read_reply(node: int, message: Message, limit: int) -> bytes | FailedUpload:
    name = node_name(node)
    if message.has_error():
        return FailedUpload(node, f"{name}: {one_line(message.error.reason or 'no reason')}")
    try:
        refusal, body = read_content(message.content)
    except (KeyError, AttributeError):
        return FailedUpload(node, f"{name}: the reply has no content", True)
    if refusal:
        return FailedUpload(node, f"{name}: {one_line(refusal)}", True)
    if (version := other_version(message.content)) is not None:
        reason = f"{name}: must run perdure {__version__} as the server, got {version}"
        return FailedUpload(node, reason, True)
    if len(body) > limit:
        reason = f"{name}: the reply must be at most {limit} bytes, got {len(body)}"
        return FailedUpload(node, reason, True)
    return body
