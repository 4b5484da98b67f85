"""FedProTIP: local projection, bases, references, routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
import yaml
from subspace_runs import (
    clients_of,
    experiment_of,
    interference,
    local_change,
    next_task,
    second_task,
    train_task,
    training_of,
)

import perdure
from perdure.config import parse
from perdure.contract import Client, CollectedUploads, Each, Prepared, ProjectOut, Sum
from perdure.contract.step import target_losses
from perdure.core.errors import UserError
from perdure.core.trees import subtract
from perdure.methods.fedprotip import FedProTIP
from perdure.methods.parts.client_bases import PrincipalBasis
from perdure.methods.parts.protected_layers import ProjectionRecord, layer_subspace
from perdure.methods.registry import build
from perdure.training.loop import begin_task
from perdure.training.round import train_round
from perdure.training.state import RunState


def at_second_task(method: dict[str, Any], **sections: Any) -> tuple[Any, RunState]:
    """An experiment at the beginning of its second task."""
    return second_task({"kind": "fedprotip", **method}, **sections)


def spaces_of(state: RunState) -> dict[str, Any]:
    """What is broadcast in training."""
    return {"spaces": state.server.state.spaces}


def change_of(experiment: Any, state: RunState) -> dict[str, torch.Tensor]:
    """What the local steps of the first client change."""
    client = clients_of(experiment, state, spaces_of(state))[0]
    return local_change(experiment, state, client, spaces_of(state))


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
    experiment, state = at_second_task({"threshold": threshold}, train=train)
    change, spaces = change_of(experiment, state), state.server.state.spaces
    assert len(spaces) == 3
    assert float(change["fc1.weight"].norm()) > 1e-4
    assert interference(change, spaces) < 1e-5


class OnGradients(ProjectOut):
    """Projects gradients, never layer inputs: that is done for the exact class alone."""


class Plain(FedProTIP):
    """FedProTIP without the quick way."""

    def project_steps(self, client: Client) -> Prepared:
        return Prepared(transforms=(OnGradients(client.broadcast.get("spaces", {})),))


def input_projections(experiment: Any, state: RunState) -> set[str]:
    """The weights whose projection the engine does on layer inputs."""
    training = training_of(experiment, state, spaces_of(state))
    client = clients_of(experiment, state, spaces_of(state))[0]
    return set(training.input_projections(training.prepare_client(client).transforms))


@pytest.mark.parametrize("threshold", [0.4, 0.6, 0.9])
@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_projected_inputs_give_the_projected_gradient(engine: str, threshold: float) -> None:
    """The engine's quick way, on layers with more rows than a batch, changes nothing."""
    found = []
    for kind in (FedProTIP, Plain):
        experiment, state = at_second_task({"threshold": threshold}, engine={"kind": engine})
        experiment = replace(experiment, method=kind(threshold=threshold))
        quick = input_projections(experiment, state)
        assert quick == ({"fc1.weight", "fc2.weight"} if kind is FedProTIP else set())
        train_round(experiment, state)
        found.append(state.server.params)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-6, rtol=1e-4)


def test_with_weight_decay_gradients_are_projected() -> None:
    experiment, state = at_second_task({}, train={"weight_decay": 0.01})
    assert input_projections(experiment, state) == set()


def test_a_whole_round_does_not_disturb_protected_inputs() -> None:
    experiment, state = at_second_task({}, train={"momentum": 0.9, "weight_decay": 0.01})
    before = state.server.params
    train_round(experiment, state)
    change = subtract(state.server.params, before)
    assert interference(change, state.server.state.spaces) < 1e-5


def test_server_variant_projects_only_the_aggregate() -> None:
    experiment, state = at_second_task({"projection": "server"})
    spaces, before = state.server.state.spaces, state.server.params
    assert interference(change_of(experiment, state), spaces) > 0.05
    train_round(experiment, state)
    assert interference(subtract(state.server.params, before), spaces) < 1e-5


@pytest.mark.parametrize("rule", ["gpm", "mass"])
def test_bases_of_a_client_by_numpy(rule: str) -> None:
    """Eqs. 6 to 8 on the input layer, where the columns are the images themselves."""
    experiment, state = at_second_task({"bases": "union", "threshold": 0.7, "rank_rule": rule})
    spaces = state.server.state.spaces
    for client in clients_of(experiment, state, {"spaces": spaces}):
        x = np.concatenate([b.x.flatten(1).numpy() for b in client.data.batches()]).T.astype(float)
        known = layer_subspace(spaces, experiment.network.layers[0])
        projected = known.project_out_columns(torch.tensor(x)).numpy()
        left, s, _ = np.linalg.svd(projected, full_matrices=False)
        threshold = experiment.method.threshold_at(1)
        if rule == "mass":
            rank = int(np.argmax(np.cumsum(s) / s.sum() >= threshold)) + 1
        else:
            covered = 1 - (s**2).sum() / (x**2).sum() + np.cumsum(s**2) / (x**2).sum()
            rank = int(np.argmax(covered >= threshold)) + 1
        ours = experiment.method.send_bases(client).fields["bases"]
        assert isinstance(ours, Each)
        directions = ours.value["fc1.weight"].double().numpy()
        assert directions.shape[1] == rank
        assert scipy.linalg.subspace_angles(directions, left[:, :rank]).max() < 1e-3


def test_union_does_not_depend_on_the_order_of_clients() -> None:
    method = {"kind": "fedprotip", "bases": "union", "routing": "off", "threshold": 0.4}
    experiment = experiment_of(method)
    state = experiment.initial_state()
    begin_task(experiment, state)
    values = {
        c.id: experiment.method.send_bases(c).fields["bases"].value
        for c in clients_of(experiment, state, {})
    }
    context, projectors = experiment.context(state), []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        uploads = CollectedUploads(per_client={"bases": {n: values[n] for n in order}})
        spaces = experiment.method.extend_subspaces(state.server, uploads, context).state.spaces
        eye = torch.eye(64, dtype=torch.float64)
        projectors.append(
            layer_subspace(spaces, experiment.network.layers[0]).project_out_columns(eye)
        )
    torch.testing.assert_close(projectors[0], projectors[1], atol=1e-5, rtol=0)
    every = np.concatenate([v["fc1.weight"].double().numpy() for v in values.values()], axis=1)
    onto = scipy.linalg.orth(every, rcond=1e-5)
    np.testing.assert_allclose(projectors[0], np.eye(64) - onto @ onto.T, atol=1e-4)


def test_sketches_send_only_sums_and_protect_the_same_subspace() -> None:
    method = {"transport": "sketch", "sketch_size": 300, "threshold": 0.95, "bases": "union"}
    experiment = experiment_of({"kind": "fedprotip", **method})
    state = experiment.initial_state()
    begin_task(experiment, state)
    for client in clients_of(experiment, state, {}):
        upload = experiment.method.send_bases(client).fields
        assert all(isinstance(part, Sum) for part in upload.values())
        assert upload["directions"].value["fc1.weight/sketch"].shape == (64, 300)
    event = train_task(experiment, state)
    assert set(state.server.state.references) == {"all"}
    assert event["routing"][0] == 1.0
    inputs = torch.cat([b.x.flatten(1) for b in client.data.batches()]).T
    space = layer_subspace(state.server.state.spaces, experiment.network.layers[0])
    assert float(space.project_out_columns(inputs).norm().square() / inputs.norm().square()) < 0.15


def test_bases_are_pooled_unless_another_way_is_chosen() -> None:
    def protected(**options: Any) -> Any:
        experiment = experiment_of({"kind": "fedprotip", "threshold": 0.8, **options})
        state = experiment.initial_state()
        train_task(experiment, state)
        return layer_subspace(state.server.state.spaces, experiment.network.layers[0])

    default, pooled, union = protected(), protected(bases="pooled"), protected(bases="union")
    x = torch.eye(64)
    assert torch.equal(default.project_out_columns(x), pooled.project_out_columns(x))
    assert default.rank < union.rank


@pytest.mark.parametrize(("bases", "margin"), [("pooled", 1e-4), ("union", 0.02)])
def test_sums_of_a_run_cover_the_threshold_and_not_its_square(bases: str, margin: float) -> None:
    """Clients cut nothing before the sum: moments are exact, sketches up to their noise."""
    method = {"kind": "fedprotip", "transport": "sketch", "sketch_size": 2000, "bases": bases}
    experiment = experiment_of({**method, "threshold": 0.95})
    state = experiment.initial_state()
    train_task(experiment, state)
    task = experiment.task(0)
    rows = torch.cat([task.partition.index(client) for client in range(4)])
    inputs = task.train.gather(rows).flatten(1).T.double()
    space = layer_subspace(state.server.state.spaces, experiment.network.layers[0])
    left = space.project_out_columns(inputs)
    covered = 1 - float(left.square().sum() / inputs.square().sum())
    assert 0.95 - margin <= covered <= 0.97


def test_a_sketch_does_not_know_the_signs_of_singular_vectors() -> None:
    directions = torch.linalg.qr(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)))[0]
    singular = torch.tensor([4.0, 2.0, 1.0, 0.5])
    sent = []
    for signs in ([1, 1, 1, 1], [-1, 1, -1, 1]):
        basis = PrincipalBasis(directions * torch.tensor(signs), singular, 1.0)
        generator = torch.Generator().manual_seed(1)
        sent.append(basis.sketch(7, generator))
    torch.testing.assert_close(*sent)


def test_routing_off_is_the_same_training() -> None:
    """(-t): the very same model, one extra round less, no task is predicted."""
    models = []
    for routing in ("sample", "off", "batch"):
        experiment = experiment_of({"kind": "fedprotip", "routing": routing})
        state = experiment.initial_state()
        event = train_task(experiment, state)
        next_task(state)
        train_task(experiment, state)
        models.append(state.server.params)
        assert (event["routing"][0] is None) == (routing == "off")
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
    assert set(model.server.state.blocks) == {"0", "1"}
    assert set(model.server.state.references) == {"0", "1", "2"}
    assert model.server.state.spaces == {}
    assert len(model.predict(np.zeros((3, 8, 8), dtype=np.uint8))) == 3


def test_diagnostics_of_section_5() -> None:
    experiment = experiment_of({"kind": "fedprotip", "diagnostics": True, "threshold": 0.8})
    state = experiment.initial_state()
    first = train_task(experiment, state)["method"]["geometry"]
    gradient = state.server.state.geometry.gradients["0"]
    assert first["rho"] == [1.0]
    # the clients' gradients, weighted by their sizes, are that of all data
    clients = clients_of(experiment, state, {})
    rows = torch.cat([client.data.index for client in clients])
    params = {n: p.clone().requires_grad_() for n, p in clients[0].params.items()}
    batch = clients[0].data.batch(rows)
    loss = target_losses(clients[0].logits(batch, params), batch).mean()
    full = torch.autograd.grad(loss, params["fc2.weight"])[0]
    torch.testing.assert_close(gradient["fc2.weight"], full, atol=1e-5, rtol=1e-3)
    next_task(state)
    second = train_task(experiment, state)["method"]["geometry"]
    assert 0 < second["rho"][1] < 1
    assert [len(row) for row in second["beta"]] == [1, 2]
    assert second["beta"][1][0] <= second["beta"][0][0] + 1e-6


def test_frozen_prefixes() -> None:
    experiment, state = at_second_task({"frozen": ["fc1"]})
    names = experiment.exchanges(state).train.trainable
    assert names == ("fc2.weight", "head.weight")
    assert set(state.server.state.spaces) == {"fc2.weight", "head.weight"}


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0},
        {"threshold": 1.5},
        {"rank_rule": "energy"},
        {"max_columns": 0},
        {"sketch_size": 0},
        {"space_rank": 0},
        {"space_rank": "all"},
        {"unknown": 2.0},
        {"router_layers": 0},
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


def test_off_without_quotes_switches_routing_off() -> None:
    """YAML reads the word off as false."""
    config = parse(yaml.safe_load("method: {kind: fedprotip, routing: off}"))
    assert build(config.method, None).routing == "off"


def test_beta_is_in_the_order_of_the_tasks_beyond_the_tenth() -> None:
    record, space = ProjectionRecord(), {"w": {"basis": torch.eye(2)[:, :1]}}
    for task in range(11):  # only the gradient of the last task lies outside of the space
        gradient = {"w": torch.eye(2)[task // 10 : task // 10 + 1]}
        record = record.with_task(task, gradient, {}, space)
    assert record.beta[-1] == [0.0] * 10 + [1.0]
    assert record.rho == [1.0] * 11
