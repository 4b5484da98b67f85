"""FedProTIP: local projection, bases, references, routing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
import yaml
from subspace_runs import clients_of, experiment_of, next_task, train_task

import perdure
from perdure.algebra.subspaces import Space
from perdure.config import parse
from perdure.engines.serial import train_client
from perdure.engines.work import Job
from perdure.errors import UserError
from perdure.federation.loop import begin_task, train_round
from perdure.federation.messages import Each, Report, Sum
from perdure.federation.state import State
from perdure.methods import build
from perdure.methods.fedprotip import FedProTIP
from perdure.methods.parts.bases import CoreBasis
from perdure.methods.parts.projection import left_over, space_of
from perdure.trees import subtract


def second_task(method: dict[str, Any], **sections: Any) -> tuple[Any, State]:
    """An experiment at the beginning of its second task."""
    experiment = experiment_of({"kind": "fedprotip", **method}, **sections)
    state = experiment.start()
    train_task(experiment, state)
    next_task(state)
    begin_task(experiment, state)
    return experiment, state


def local_change(experiment: Any, state: State) -> dict[str, torch.Tensor]:
    """What one client's local steps change."""
    spaces = {"spaces": state.server.memory["spaces"]}
    client = clients_of(experiment, state, spaces)[0]
    place, train = experiment.place(state), experiment.config.train
    job = Job(experiment.method, place, train, client.params, client.buffers, client.received)
    return subtract(train_client(job, client)[0], client.params)


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
        {"clip": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_local_steps_stay_out_of_the_protected_space(train: Any, threshold: float) -> None:
    experiment, state = second_task({"threshold": threshold}, train=train)
    change, spaces = local_change(experiment, state), state.server.memory["spaces"]
    assert len(spaces) == 3
    assert float(change["fc1.weight"].norm()) > 1e-4
    assert left_over(change, spaces) < 1e-5


class Unguarded(FedProTIP):
    """Projects gradients only, never layer inputs."""

    def guards(self, received: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("threshold", [0.4, 0.6, 0.9])
@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_projected_inputs_give_the_projected_gradient(engine: str, threshold: float) -> None:
    """The engine's quick way, on layers with more rows than a batch, changes nothing."""
    found = []
    for kind in (FedProTIP, Unguarded):
        experiment, state = second_task({"threshold": threshold}, engine={"kind": engine})
        object.__setattr__(experiment, "method", kind(threshold=threshold))
        received = {"params": state.server.params, "spaces": state.server.memory["spaces"]}
        place, train = experiment.place(state), experiment.config.train
        job = Job(experiment.method, place, train, state.server.params, {}, received)
        assert set(job.guards(job.received)) == (
            {"fc1.weight", "fc2.weight"} if kind is FedProTIP else set()
        )
        train_round(experiment, state)
        found.append(state.server.params)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-6, rtol=1e-4)


def test_with_weight_decay_gradients_are_projected() -> None:
    experiment, state = second_task({}, train={"weight_decay": 0.01})
    received = {"params": state.server.params, "spaces": state.server.memory["spaces"]}
    place, train = experiment.place(state), experiment.config.train
    job = Job(experiment.method, place, train, state.server.params, {}, received)
    assert job.guards(job.received) == {}


def test_the_round_as_a_whole_too() -> None:
    experiment, state = second_task({}, train={"momentum": 0.9, "weight_decay": 0.01})
    before = state.server.params
    train_round(experiment, state)
    change = subtract(state.server.params, before)
    assert left_over(change, state.server.memory["spaces"]) < 1e-5


def test_server_variant_projects_only_the_aggregate() -> None:
    experiment, state = second_task({"projection": "server"})
    spaces, before = state.server.memory["spaces"], state.server.params
    assert left_over(local_change(experiment, state), spaces) > 0.05
    train_round(experiment, state)
    assert left_over(subtract(state.server.params, before), spaces) < 1e-5


@pytest.mark.parametrize("rule", ["gpm", "mass"])
def test_bases_of_a_client_by_numpy(rule: str) -> None:
    """Eqs. 6 to 8 on the input layer, where the columns are the images themselves."""
    experiment, state = second_task({"threshold": 0.7, "rank_rule": rule})
    spaces = state.server.memory["spaces"]
    for client in clients_of(experiment, state, {"spaces": spaces}):
        x = np.concatenate([b.x.flatten(1).numpy() for b in client.shard.batches()]).T.astype(float)
        known = space_of(spaces, experiment.network.layers[0])
        projected = known.residual(torch.tensor(x)).numpy()
        left, s, _ = np.linalg.svd(projected, full_matrices=False)
        threshold = experiment.method.threshold_at(1)
        if rule == "mass":
            rank = int(np.argmax(np.cumsum(s) / s.sum() >= threshold)) + 1
        else:
            covered = 1 - (s**2).sum() / (x**2).sum() + np.cumsum(s**2) / (x**2).sum()
            rank = int(np.argmax(covered >= threshold)) + 1
        ours = experiment.method.extract(client).upload["bases"]
        assert isinstance(ours, Each)
        directions = ours.value["fc1.weight"].double().numpy()
        assert directions.shape[1] == rank
        assert scipy.linalg.subspace_angles(directions, left[:, :rank]).max() < 1e-3


def test_union_does_not_depend_on_the_order_of_clients() -> None:
    experiment = experiment_of({"kind": "fedprotip", "routing": "off", "threshold": 0.4})
    state = experiment.start()
    begin_task(experiment, state)
    values = {
        c.id: experiment.method.extract(c).upload["bases"].value
        for c in clients_of(experiment, state, {})
    }
    place, projectors = experiment.place(state), []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        report = Report(each={"bases": {number: values[number] for number in order}})
        spaces = experiment.method.absorb(state.server, report, place).memory["spaces"]
        eye = torch.eye(64, dtype=torch.float64)
        projectors.append(space_of(spaces, experiment.network.layers[0]).residual(eye))
    torch.testing.assert_close(projectors[0], projectors[1], atol=1e-5, rtol=0)
    every = np.concatenate([v["fc1.weight"].double().numpy() for v in values.values()], axis=1)
    onto = scipy.linalg.orth(every, rcond=1e-5)
    np.testing.assert_allclose(projectors[0], np.eye(64) - onto @ onto.T, atol=1e-4)


def test_blocks_are_orthogonal_and_references_exact() -> None:
    """The references after two tasks are those of the features of each task's own end."""
    experiment = experiment_of({"kind": "fedprotip"}, stream={"tasks": 2})
    state = experiment.start()
    features = []
    for _ in range(2):
        train_task(experiment, state)
        clients = clients_of(experiment, state, {})
        client = clients[0]
        features.append(
            torch.cat([client.net().features(client.params, b.x) for b in client.shard.batches()])
        )
        next_task(state) if state.task == 0 else None
    memory = state.server.memory
    blocks = [memory["blocks"][key].double().numpy() for key in ("0", "1")]
    np.testing.assert_allclose(blocks[0].T @ blocks[1], 0, atol=1e-5)
    rows = memory["references"]["0"].numpy()
    for task, a in enumerate(features):
        for other, u in enumerate(blocks):
            expected = np.linalg.norm(a.double().numpy() @ u @ u.T) / np.sqrt(len(a))
            assert rows[task, other] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_strict_references_are_zero_for_later_blocks() -> None:
    experiment = experiment_of({"kind": "fedprotip", "references": "strict"}, stream={"tasks": 2})
    state = experiment.start()
    train_task(experiment, state)
    next_task(state)
    train_task(experiment, state)
    rows = state.server.memory["references"]["0"]
    assert (rows > 0).tolist() == [[True, False], [True, True]]
    assert set(experiment.store.get(0)["moments"]) == {"1"}


def test_no_activation_is_kept_and_no_moment_sent() -> None:
    experiment = experiment_of({"kind": "fedprotip"})
    state = experiment.start()
    train_task(experiment, state)
    kept = experiment.store.get(0)
    assert set(kept) == {"moments", "counts"}
    assert kept["moments"]["0"].shape == (20, 20)
    assert state.server.memory["references"]["0"].shape == (1, 1)
    assert set(state.ledger.by_field) >= {"up/bases", "up/references", "down/blocks"}


def test_sketch_sends_only_sums_and_protects_alike() -> None:
    method = {"transport": "sketch", "sketch_size": 300, "threshold": 0.95}
    experiment = experiment_of({"kind": "fedprotip", **method})
    state = experiment.start()
    begin_task(experiment, state)
    for client in clients_of(experiment, state, {}):
        upload = experiment.method.extract(client).upload
        assert all(isinstance(part, Sum) for part in upload.values())
        assert upload["bases"].value["fc1.weight"].shape == (64, 300)
    event = train_task(experiment, state)
    assert set(state.server.memory["references"]) == {"all"}
    assert event["routing"][0] == 1.0
    inputs = torch.cat([b.x.flatten(1) for b in client.shard.batches()]).T
    space = space_of(state.server.memory["spaces"], experiment.network.layers[0])
    assert float(space.residual(inputs).norm().square() / inputs.norm().square()) < 0.25


def test_a_sketch_does_not_know_the_signs_of_singular_vectors() -> None:
    method = build({"kind": "fedprotip", "transport": "sketch", "sketch_size": 7})
    assert isinstance(method, FedProTIP)
    directions = torch.linalg.qr(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)))[0]
    singular = torch.tensor([4.0, 2.0, 1.0, 0.5])
    sent = []
    for signs in ([1, 1, 1, 1], [-1, 1, -1, 1]):
        basis = CoreBasis(directions * torch.tensor(signs), singular)
        generator = torch.Generator().manual_seed(1)
        sent.append(method._send_bases({"x": basis}, generator)["bases"].value["x"])
    torch.testing.assert_close(*sent)


def test_sums_of_references_are_those_of_all_data_together() -> None:
    experiment = experiment_of({"kind": "fedprotip", "transport": "sketch"})
    state = experiment.start()
    train_task(experiment, state)
    block = state.server.memory["blocks"]["0"]
    parts = [
        client.net().features(client.params, batch.x)
        for client in clients_of(experiment, state, {})
        for batch in client.shard.batches()
    ]
    features = torch.cat(parts)
    expected = float((features @ block).norm() / len(features) ** 0.5)
    assert float(state.server.memory["references"]["all"]) == pytest.approx(expected, rel=1e-3)


def test_routing_off_is_the_same_training() -> None:
    """(-t): the very same model, one extra round less, no routed matrix."""
    models = []
    for routing in ("sample", "off", "batch"):
        experiment = experiment_of({"kind": "fedprotip", "routing": routing})
        state = experiment.start()
        event = train_task(experiment, state)
        next_task(state)
        train_task(experiment, state)
        models.append(state.server.params)
        assert (event["accuracy"]["routed"][0] is None) == (routing == "off")
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name])
        torch.testing.assert_close(value, models[2][name])


def test_split_streams_grow_heads_and_route(tmp_path: Any) -> None:
    values = {
        "stream": {"kind": "split", "tasks": 2, "classes_per_task": 2},
        "clients": {"count": 3},
        "model": {"hidden": [40]},
        "method": {"kind": "fedprotip"},
        "train": {"rounds": 4, "lr": 0.1},
        "engine": {"kind": "serial"},
    }
    result = perdure.run(values, out=tmp_path / "run")
    assert result.metrics["routed"]["ACC"] > result.metrics["task_agnostic"]["ACC"] - 0.05
    assert result.metrics["task_aware"]["ACC"] > 0.9
    assert min(result.values["routing"][-1]) > 0.5
    model = perdure.load(tmp_path / "run")
    assert set(model.server.memory) == {"blocks", "references"}
    assert len(model.predict(np.zeros((3, 8, 8), dtype=np.uint8))) == 3


def test_absent_clients_keep_their_old_references() -> None:
    experiment = experiment_of({"kind": "fedprotip"}, stream={"tasks": 3, "presence": 0.4})
    state = experiment.start()
    for task in range(3):
        event = train_task(experiment, state)
        assert len(event["routing"]) == 3
        next_task(state) if task < 2 else None
    assert all(len(rows) <= 3 for rows in state.server.memory["references"].values())
    experiment.method.route(state.server, torch.zeros(2, 1, 8, 8), experiment.network)


def test_diagnostics_of_section_5() -> None:
    experiment = experiment_of({"kind": "fedprotip", "diagnostics": True, "threshold": 0.8})
    state = experiment.start()
    first = train_task(experiment, state)["method"]["geometry"]
    gradient = state.server.memory["geometry"]["gradients"]["0"]
    assert first["rho"] == [1.0]
    # the clients' gradients, weighted by their sizes, are that of all data
    clients = clients_of(experiment, state, {})
    rows = torch.cat([client.shard.index for client in clients])
    params = {n: p.clone().requires_grad_() for n, p in clients[0].params.items()}
    batch = clients[0].shard.batch(rows)
    loss = batch.cross_entropy(clients[0].net().logits(params, batch.x))
    full = torch.autograd.grad(loss, params["fc2.weight"])[0]
    torch.testing.assert_close(gradient["fc2.weight"], full, atol=1e-5, rtol=1e-3)
    next_task(state)
    second = train_task(experiment, state)["method"]["geometry"]
    assert 0 < second["rho"][1] < 1
    assert [len(row) for row in second["beta"]] == [1, 2]
    assert second["beta"][1][0] <= second["beta"][0][0] + 1e-6


def test_frozen_prefixes() -> None:
    experiment, state = second_task({"frozen": ["fc1"]})
    names = experiment.method.trainable(state.server.params, experiment.place(state))
    assert names == ("fc2.weight", "head.weight")
    assert set(state.server.memory["spaces"]) == {"fc2.weight", "head.weight"}


def test_block_rank_leaves_room_for_all_tasks() -> None:
    experiment = experiment_of({"kind": "fedprotip", "space_rank": 20}, stream={"tasks": 4})
    assert experiment.method.block_rank(experiment.place(experiment.start())) == 5
    assert FedProTIP(space_rank=3).block_rank(experiment.place(experiment.start())) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0},
        {"threshold": 1.5},
        {"rank_rule": "energy"},
        {"columns": 0},
        {"sketch_size": 0},
        {"space_rank": 0},
        {"projection": "both"},
        {"routing": "yes"},
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"method.{next(iter(options))}"):
        build({"kind": "fedprotip", **options})


def test_pool_streams_only_without_routing() -> None:
    with pytest.raises(UserError, match=r"method.routing"):
        experiment_of({"kind": "fedprotip"}, stream={"kind": "pool", "classes_per_task": 2})
    experiment_of(
        {"kind": "fedprotip", "routing": "off"}, stream={"kind": "pool", "classes_per_task": 2}
    )
    assert Space.empty(3).rank == 0


def test_off_without_quotes_switches_routing_off() -> None:
    """YAML reads the word off as false."""
    config = parse(yaml.safe_load("method: {kind: fedprotip, routing: off}"))
    assert build(config.method, None).routing == "off"
