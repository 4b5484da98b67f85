"""A federation without processes: requests and replies are bytes that stay in the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from perdure.config import Config, dump, parse
from perdure.contract.uploads import FailedUpload
from perdure.federation.messages import BadMessage, read_header
from perdure.federation.node.policy import TRIAL
from perdure.federation.node.uploads import SecretDraws
from perdure.federation.node.worker import Node, make_node
from perdure.federation.server.engine import FlowerEngine
from perdure.training.settings import with_method_defaults

RUN = "0123456789abcdef" * 2


class InProcessTransport:
    """Reaches nodes that are objects of this process; `spoil` may change a node's reply."""

    def __init__(
        self, config: Config, folder: Path, data: Mapping[int, Path] | None = None
    ) -> None:
        self.config, self.folder, self.data = config, folder, data or {}
        self.nodes: dict[int, Node] = {}
        self.spoil = lambda node, request, reply: reply
        self.make_secret_source = SecretDraws
        self.policy = TRIAL
        self.log: list[tuple[int, str, int]] = []

    def node(self, number: int) -> Node:
        if number not in self.nodes:
            node_config = {"number": number, "state": str(self.folder / f"node-{number}" / "state")}
            if number in self.data:
                node_config["data"] = str(self.data[number])
            run = {"config": dump(self.config), "run": RUN}
            node = make_node(run, node_config, self.policy)
            clients = replace(node.clients, make_secret_source=self.make_secret_source)
            self.nodes[number] = replace(node, clients=clients)
        return self.nodes[number]

    def send_and_receive(
        self, headers: Mapping[int, str], body: bytes, limit: int
    ) -> dict[int, bytes | FailedUpload]:
        replies: dict[int, bytes | FailedUpload] = {}
        for number, header in headers.items():
            request = read_header(header)
            self.log.append((number, request.kind, request.position.task))
            try:
                reply: bytes | FailedUpload = self.node(number).serve(request, body)
            except BadMessage as error:
                reply = FailedUpload(number, str(error), True)
            replies[number] = self.spoil(number, request, reply)
        return replies


def no_secrets() -> None:
    """Let secret draws derive from the run's seed, as in a simulation."""


def in_process_engine(
    config: dict, folder: Path, data: Mapping[int, Path] | None = None
) -> tuple[FlowerEngine, InProcessTransport]:
    """Return an engine over nodes in this process, and its transport."""
    checked = with_method_defaults(parse(config))
    transport = InProcessTransport(checked, folder, data)
    return FlowerEngine.with_transport(checked, transport), transport
