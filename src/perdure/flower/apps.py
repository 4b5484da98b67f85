"""Flower's two apps: the loop on the server, a node's work. They only connect; see engine and node.

Heavy imports wait until they are needed: where executor cannot fork, every order loads anew.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from perdure.contract.upload_collector import FailedUpload
from perdure.flower.folders import node_name, node_number

if TYPE_CHECKING:
    from perdure.flower.node_worker import Node

client = ClientApp()
server = ServerApp()
log = logging.getLogger(__name__)

_POLL = 0.3
_WATCH = 1.0
_GRACE = 15.0
"""Seconds to wait for a node that was there before and is not connected now."""
_ABSENT = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
_LINE = 300
_BODY, _HEAD = "body", "head"


def _content(head: str, body: bytes) -> RecordDict:
    """Bytes as one array: Flower cuts arrays into pieces, and sends equal pieces once."""
    array = Array("uint8", (len(body),), "bytes", body)
    return RecordDict({_BODY: ArrayRecord({_BODY: array}), _HEAD: ConfigRecord({_HEAD: head})})


def _read(content: RecordDict) -> tuple[str, bytes]:
    body = content.array_records[_BODY][_BODY].data
    return str(content.config_records[_HEAD][_HEAD]), body


class FlowerTransport:
    """The way to the nodes over Flower's grid."""

    def __init__(self, grid: Grid, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout
        self._met: set[int] = set()

    def send_and_receive(
        self, heads: Mapping[int, str], body: bytes, limit: int
    ) -> dict[int, bytes | FailedUpload]:
        """Send, then ask for answers until all are there or the time is over.

        If all who were there turn out to be gone, Flower may have taken a federation's last life
        for alive: then once more, with the patience that nodes get that are still starting.
        """
        replies, gone = self._ask(heads, body, limit)
        if gone and not any(_answered(reply) for reply in replies.values()):
            log.warning("no node is there any more; waiting for them once")
            self._met.clear()
            replies, _ = self._ask(heads, body, limit)
        return replies

    def _ask(
        self, heads: Mapping[int, str], body: bytes, limit: int
    ) -> tuple[dict[int, bytes | FailedUpload], set[int]]:
        """Replies by node, and the nodes that were sent an order and are gone."""
        there = self._nodes(list(heads))
        replies: dict[int, bytes | FailedUpload] = {
            node: FailedUpload(node, f"{node_name(node)} is not connected")
            for node in heads
            if node not in there
        }
        waiting = self._send({node: heads[node] for node in there}, there, body)
        gone: set[int] = set()
        end = time.monotonic() + self._timeout
        while waiting and time.monotonic() < end:
            for message in self._grid.pull_messages(list(waiting)):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    replies[node] = _reply(node, message, limit)
                    gone |= {node} if _tells_of_absence(message) else set()
            if waiting:
                time.sleep(_POLL)
        late = f"no answer within {self._timeout:g} s"
        return replies | {node: FailedUpload(node, late) for node in waiting.values()}, gone

    def _nodes(self, wanted: list[int]) -> dict[int, int]:
        """Flower's numbers of the nodes that are connected; waits for those that are not.

        Who was never there may still be starting; who is gone again, or was waited for once, is
        soon given up.
        """
        new = any(node not in self._met for node in wanted)
        end = time.monotonic() + (self._timeout if new else _GRACE)
        self._met.update(wanted)
        while True:
            found = {node_number(info.name): info.node_id for info in self._grid.get_nodes()}
            there = {node: found[node] for node in wanted if node in found}
            if len(there) == len(wanted) or time.monotonic() > end:
                return there
            time.sleep(_POLL)

    def _send(self, heads: dict[int, str], there: dict[int, int], body: bytes) -> dict[str, int]:
        messages = [
            Message(_content(head, body), there[node], "train.work", ttl=self._timeout + 60)
            for node, head in heads.items()
        ]
        numbers = self._grid.push_messages(messages) if messages else []
        return {number: node for number, node in zip(numbers, heads, strict=True) if number}


def _answered(reply: bytes | FailedUpload) -> bool:
    return not isinstance(reply, FailedUpload) or reply.answered


def _tells_of_absence(message: Message) -> bool:
    """Flower answers in place of a node that has gone: message, reply or node not to be had."""
    return message.has_error() and message.error.code in _ABSENT


def _reply(node: int, message: Message, limit: int) -> bytes | FailedUpload:
    if message.has_error():
        return FailedUpload(node, f"{node_name(node)}: {_line(message.error.reason)}")
    try:
        refused, body = _read(message.content)
    except (KeyError, AttributeError):
        return FailedUpload(node, f"{node_name(node)}: an answer without content", True)
    if refused:
        return FailedUpload(node, f"{node_name(node)}: {_line(refused)}", True)
    if len(body) > limit:
        return FailedUpload(
            node, f"{node_name(node)}: an answer of {len(body)} bytes, allowed: {limit}", True
        )
    return body


def _line(text: str | None) -> str:
    """What a node says, fit for a log: one line, not too long, nothing but printable characters."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text or "no reason")
    return " ".join(plain.split())[:_LINE]


@server.main()
def lead(grid: Grid, context: Context) -> None:
    """The server's part of a run: the one loop, with the nodes behind its engine."""
    from perdure.flower.lead import run_submission

    _speak()
    _end_with_starter()
    run_submission(context.run_config, lambda timeout: FlowerTransport(grid, timeout))


@client.train("work")
def work(message: Message, context: Context) -> Message:
    """A node's answer to one order."""
    from perdure.flower.protocol import BadMessage, read_head

    _speak()
    _end_with_starter()
    head, body = _read(message.content)
    try:
        reply = _node(context).serve(read_head(head), body)
    except BadMessage as error:
        log.warning("refused: %s", error)
        return Message(_content(str(error), b""), reply_to=message)
    return Message(_content("", reply), reply_to=message)


def _node(context: Context) -> Node:
    from perdure.flower.node_worker import make_node

    return make_node(context.run_config, context.node_config)


def _speak() -> None:
    """The library's messages beside Flower's own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("perdure: %(levelname)s: %(message)s"))
    logger = logging.getLogger("perdure")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _end_with_starter() -> None:
    """End with the executor that started this process.

    Flower's executors do not take their apps with them when they are killed: a loop whose server
    has died would go on beside the one that the next server starts, in the same run directory.
    """
    starter = os.getppid()

    def watch() -> None:
        while os.getppid() == starter:
            time.sleep(_WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
