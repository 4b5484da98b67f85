"""A federation without processes: orders and replies are bytes, but nothing leaves the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from perdure.config import Config, dump, parse
from perdure.contract.upload_collector import FailedUpload
from perdure.flower.engine import FlowerEngine
from perdure.flower.node_worker import Node, Secrets, make_node
from perdure.flower.protocol import BadMessage, read_head
from perdure.flower.server_stream import node_count

RUN = "0123456789abcdef" * 2


class HereLink:
    """The nodes as objects; `spoil` may change a node's reply, `secrets` make secret draws."""

    def __init__(
        self, config: Config, folder: Path, data: Mapping[int, Path] | None = None
    ) -> None:
        self.config, self.folder, self.data = config, folder, data or {}
        self.nodes: dict[int, Node] = {}
        self.spoil = lambda node, order, reply: reply
        self.secrets = Secrets
        self.log: list[tuple[int, str, int]] = []

    def node(self, number: int) -> Node:
        if number not in self.nodes:
            said = {"number": number, "state": str(self.folder / f"node-{number}")}
            if number in self.data:
                said["data"] = str(self.data[number])
            run = {"config": dump(self.config), "run": RUN}
            self.nodes[number] = replace(make_node(run, said), secrets=self.secrets)
        return self.nodes[number]

    def send_and_receive(
        self, heads: Mapping[int, str], body: bytes, limit: int
    ) -> dict[int, bytes | FailedUpload]:
        replies: dict[int, bytes | FailedUpload] = {}
        for number, head in heads.items():
            order = read_head(head)
            self.log.append((number, order.kind, order.spot.task))
            try:
                reply: bytes | FailedUpload = self.node(number).serve(order, body)
            except BadMessage as error:
                reply = FailedUpload(number, str(error), True)
            replies[number] = self.spoil(number, order, reply)
        return replies


def no_secrets() -> None:
    """Secret draws as in a simulation: from the run's seed."""


def here(
    config: dict, folder: Path, data: Mapping[int, Path] | None = None
) -> tuple[FlowerEngine, HereLink]:
    """An engine over nodes in this process."""
    checked = parse(config)
    link = HereLink(checked, folder, data)
    return FlowerEngine(node_count(checked), link, checked.federation is not None), link
