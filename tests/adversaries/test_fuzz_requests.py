"""Requests of a server that were tampered with: a node serves or refuses them, and never fails."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fuzzing import campaign, mutated_json, mutated_message
from in_process import in_process_engine
from own_data import CONFIG as LOCAL
from own_data import write_nodes

from perdure.contract.uploads import FailedUpload
from perdure.federation.messages import BadMessage, read_header
from perdure.federation.node.worker import Node
from perdure.runs.run import run

CONFIG: dict[str, Any] = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [2]},
    "train": {"rounds": 1, "batch_size": 64},
    "data": {"limit": 150},
    "engine": {"kind": "flower"},
    "device": "cpu",
}
CONFIGS = {
    "fedavg": {"method": {"kind": "fedavg"}},
    "fot": {"method": {"kind": "fot"}},
    "fedprotip": {"method": {"kind": "fedprotip"}},
    "ewc": {"method": {"kind": "ewc"}},
    "secure": {"clients": {"count": 4}, "privacy": {"secagg": True}},
    "local": {**LOCAL, "train": CONFIG["train"]},
}
Sent = tuple[Node, str, bytes]


@cache
def corpus(folder: Path) -> list[Sent]:
    """Return the requests of small federations, of all kinds, with the node that serves them."""
    requests: list[Sent] = []
    for name, changes in CONFIGS.items():
        config = {**CONFIG, **changes} if name != "local" else changes
        data = write_nodes(folder / "data") if name == "local" else None
        engine, transport = in_process_engine(config, folder / name, data)
        exchange = transport.send_and_receive

        def record(headers: Any, body: bytes, limit: int, link=transport, send=exchange) -> Any:
            requests.extend((link.node(node), text, body) for node, text in headers.items())
            return send(headers, body, limit)

        def drop(node: int, request: Any, reply: Any) -> Any:
            dropped = request.kind == "train" and node == 2 and request.position.task
            return FailedUpload(node, "no answer") if dropped else reply

        transport.send_and_receive = record
        transport.spoil = drop if name == "secure" else transport.spoil
        run(config, engine=engine)
    kinds = {read_header(text).kind for _, text, _ in requests}
    assert {"announce", "train", "exchange", "evaluate", "public_keys", "reveal"} <= kinds
    return requests + [
        (node, text.replace('"train"', '"evaluate"'), b) for node, text, b in requests
    ]


def mutate(rng: random.Random, sent: Sent) -> Sent:
    node, text, body = sent
    how = rng.random()
    if how < 0.7:
        text = mutated_json(rng, text)
    if how > 0.6:
        body = mutated_message(rng, body)
    return node, text, body


def serve(rng: random.Random, sent: Sent) -> None:
    node, text, body = sent
    node.serve(read_header(text), body)


def test_a_node_serves_or_refuses_every_request(tmp_path_factory: pytest.TempPathFactory) -> None:
    requests = corpus(tmp_path_factory.mktemp("requests"))
    refused = campaign("requests", requests, mutate, serve, (BadMessage,))
    assert refused
