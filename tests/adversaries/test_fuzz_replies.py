"""Replies of nodes that were tampered with: no reply raises, and no sum is ever not finite."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzzing import MESSAGES, campaign, mutated_message
from in_process import in_process_engine
from own_data import CONFIG as LOCAL
from own_data import with_federation, write_nodes

from perdure.contract.needs import Needs
from perdure.contract.uploads import FailedUpload, MaskedUpload, stack_of_one
from perdure.core.errors import RunError
from perdure.core.trees import Tensors
from perdure.evaluation.evaluator import EvaluationCounts
from perdure.federation.evaluation_counts import NeededCounts
from perdure.federation.messages import pack, unpack
from perdure.federation.server.replies import (
    ExtraReleases,
    UploadForms,
    decode_reply,
    read_client_bytes,
    read_client_upload,
    read_loss,
    read_node_counts,
    read_size,
)
from perdure.runs.run import run
from perdure.training.collector import UploadCollector

CONFIG: dict[str, Any] = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 1, "batch_size": 64},
    "data": {"limit": 150},
    "engine": {"kind": "flower"},
    "device": "cpu",
}
METHODS = {
    "fedavg": {"kind": "fedavg"},
    "fot": {"kind": "fot"},
    "fedprotip": {"kind": "fedprotip"},
    "pooled": {"kind": "fedprotip", "bases": "pooled"},
    "stamp": {"kind": "stamp"},
    "secure": {"kind": "fedavg"},
}
NEEDED = NeededCounts(("confusion", "calibration", "errors"), ((0, 1, 2, 3, 4), (5, 6)))


MEMBER: Any = SimpleNamespace(
    id=0, context=SimpleNamespace(needs=Needs()), data=range(20), max_weight=20.0
)
"""Client 0, as far as the server looks at it when it reads an upload."""


@dataclass(frozen=True)
class Case:
    """An honest reply, and what the server compares it with."""

    reply: bytes
    secure: bool
    model_fields: dict[str, Tensors]


def config_of(name: str) -> dict[str, Any]:
    if name == "local":
        train = {"rounds": 1, "max_steps": 1}
        return with_federation({**LOCAL, "train": train}, wait=0, quorum=2)
    secure = {"clients": {"count": 5}, "privacy": {"secagg": True}} if name == "secure" else {}
    return {**CONFIG, **secure, "method": METHODS[name]}


def counts_reply() -> bytes:
    sums = {
        "confusion": torch.ones(5, 6, dtype=torch.float64),
        "calibration": torch.ones(15, 3, dtype=torch.float64),
        "errors": torch.tensor([30.0, 3.0, 9.0, 1.0, 40.0], dtype=torch.float64),
    }
    modes = ("task_agnostic", "task_aware", "routed")
    tree = {
        "task": 0, "correct": dict.fromkeys(modes, 7.0), "total": 30.0,
        "predicted_tasks": [20.0, 10.0], "sums": {mode: dict(sums) for mode in modes},
    }  # fmt: skip
    return pack({"counts": [tree]})


def model_fields(kind: str, body: Any, reply: bytes) -> dict[str, Tensors]:
    """Return the tensors of which an honest client sends changes, as the server knows them."""
    update = unpack(reply).get("uploads", {}).get("0", {}).get("update")
    if kind != "train" or update is None:
        return {}
    trained = {name: body["params"][name] for name in update["value"]}
    return {"update": trained, "buffers": body["buffers"]}


@cache
def corpus(folder: Path) -> list[Case]:
    """Return the replies of small federations, to requests of all kinds."""
    releases = pack({"uploads": {}, "releases": {"0": 3, "1": 2}})
    cases = [Case(reply, False, {}) for reply in (counts_reply(), pack({"size": 90}), releases)]
    for name in METHODS:
        engine, transport = in_process_engine(config_of(name), folder / name)
        body: dict[str, Any] = {}
        exchange = transport.send_and_receive

        def remember(headers: Any, data: bytes, limit: int, body=body, exchange=exchange) -> Any:
            body["tree"] = unpack(data)
            return exchange(headers, data, limit)

        def record(node: int, request: Any, reply: Any, name=name, body=body) -> Any:
            if node == 0:
                tree = body["tree"]
                cases.append(Case(reply, name == "secure", model_fields(request.kind, tree, reply)))
            return reply

        transport.send_and_receive, transport.spoil = remember, record
        run(config_of(name), engine=engine)
    honest = [decode_reply(0, case.reply) for case in cases]
    fields = {name for tree in honest for name in tree.get("uploads", {}).get("0", {})}
    assert {"update", "bases", "directions", "references"} <= fields
    assert any(tree.get("masked") for tree in honest)
    return cases


def mutate(rng: random.Random, case: Case) -> tuple[Case, bytes]:
    return case, mutated_message(rng, case.reply)


def read_as_server(rng: random.Random, message: tuple[Case, bytes]) -> None:
    """Read a node's reply in all the ways that the server does, together with an honest one."""
    case, data = message
    reply, honest = decode_reply(0, data), decode_reply(1, case.reply)
    size = read_size(0, reply)
    assert isinstance(size, FailedUpload) or 0 <= size <= 1 << 40
    loss = read_loss(reply, 0)
    assert loss is None or abs(loss) <= 1e9
    for key in ("public_keys", "answers", "masked"):
        read_client_bytes(reply, key, 0)
    uploads = {
        client: read_client_upload(MEMBER, tree, case.secure, case.model_fields)
        for client, tree in {0: reply, 1: honest, 2: honest}.items()
    }
    collect(UploadForms().drop_others((0, 0), uploads))
    count_uploads(reply)
    counts = [
        each
        for tree in (reply, honest)
        for each in read_node_counts(tree, [0], 1, NEEDED)
        if each.total
    ]
    add_counts(counts)


def collect(uploads: dict[int, Any]) -> None:
    collector = UploadCollector()
    for client, upload in uploads.items():
        if isinstance(upload, FailedUpload):
            collector.add(upload)
        elif not isinstance(upload, MaskedUpload):
            collector.add(stack_of_one(client, 2.0, upload))
    for values in collector.collected.sums.values():
        assert all(bool(torch.isfinite(value).all()) for value in values.values())


def count_uploads(reply: Any) -> None:
    extra = ExtraReleases()
    extra.note({0: reply}, {0: [0]})
    assert set(extra.to_tree()) <= {"0"}
    assert all(0 < count < 1 << 20 for count in extra.to_tree().values())


def add_counts(counts: list[EvaluationCounts]) -> None:
    if counts:
        total = counts[0]
        for each in counts[1:]:
            total = total + each
        total.evaluation()


def test_no_reply_raises(tmp_path_factory: pytest.TempPathFactory) -> None:
    cases = corpus(tmp_path_factory.mktemp("replies"))
    campaign("replies", cases, mutate, read_as_server)


@pytest.mark.parametrize("name", [*METHODS, "local"])
def test_a_run_with_a_hostile_node_ends_well_or_stops_resumably(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = write_nodes(tmp_path_factory.mktemp("data")) if name == "local" else None

    def spoiled_run(rng: random.Random, _: Any) -> None:
        folder = tmp_path_factory.mktemp("run")
        engine, transport = in_process_engine(config_of(name), folder, data)

        def spoil(node: int, request: Any, reply: Any) -> Any:
            spoils = node == 2 and isinstance(reply, bytes) and rng.random() < 0.7
            return mutated_message(rng, reply) if spoils else reply

        transport.spoil = spoil
        run(config_of(name), engine=engine)

    runs = max(3, MESSAGES // 2000)
    campaign(f"runs {name}", [None], lambda rng, none: none, spoiled_run, (RunError,), runs)
