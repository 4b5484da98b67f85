"""PIP: its equations against numbers worked out client by client, and its ablation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from prompt_runs import begun, clients_of, prepared, small, step_loss

from perdure.algebra.class_statistics import Gaussians
from perdure.config import parse
from perdure.contract import Client, ClientResult, LocalUpdate, Sum
from perdure.contract.uploads import stack_of_one
from perdure.core.errors import UserError
from perdure.core.trees import Tensors, add
from perdure.deploy.model_files import prediction_state
from perdure.methods.pip import Pip, PipClientState, PipServerState, participation_scale
from perdure.methods.registry import build
from perdure.models.ops import ForwardPass
from perdure.models.prompts import Prompted
from perdure.training.collector import UploadCollector
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.ledger import encoded_size
from perdure.training.loop import begin_task, run_stream
from perdure.training.round import TrainingRound, train_round

TABLE_5: dict[str, dict[str, Any]] = {
    "A": {"prototypes": False, "weighted": False, "average_head": "never"},
    "B": {"weighted": False, "average_head": "never"},
    "C": {"prototypes": False, "average_head": "never"},
    "D": {"average_head": "never"},
    "E": {"prototypes": False, "weighted": False},
    "F": {"weighted": False},
    "G": {"prototypes": False},
    "PIP": {},
}


def experiment_of(**method: Any) -> Experiment:
    return build_experiment(parse(small({"kind": "pip", **method}, train={"local_epochs": 2})))


def random_update(client: Client) -> Tensors:
    generator = torch.Generator().manual_seed(100 + client.id)
    return {
        name: 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in client.params.items()
    }


def sent(experiment: Experiment, client: Client, update: Tensors | None = None) -> ClientResult:
    """Return what a client sends and keeps after a round that changed its model so."""
    make_upload = experiment.plan_task(
        client.context.task, client.params
    ).exchanges.train.make_upload
    assert make_upload is not None
    return make_upload(client, LocalUpdate(random_update(client) if update is None else update, {}))


def head_inputs(experiment: Experiment, params: Tensors, client: Client) -> np.ndarray:
    body = experiment.network.body
    assert isinstance(body, Prompted)
    batch = client.data.batch(client.data.index)
    slot = torch.eye(len(params["prompt.keys"]))[client.context.task]
    return body.features_with(params, batch.x, slot, ForwardPass()).double().numpy()


def test_the_server_has_equations_12_to_15() -> None:
    """Participations differ, and so do the classes that clients have."""
    experiment = experiment_of()
    state = begun(experiment)
    collector, updates, weights, rows = UploadCollector(), [], [], []
    for client, rho in zip(clients_of(experiment, state), (0, 3, 1), strict=True):
        client, update = replace(client, state=PipClientState(rho)), random_update(client)
        done = sent(experiment, client, update)
        assert done.state == PipClientState(rho + 1)
        assert all(isinstance(field, Sum) for field in done.fields.values())
        collector.add(stack_of_one(client.id, client.weight, done.fields))
        updates.append(update)
        weights.append((rho + 1) * len(client.data))
        found = head_inputs(experiment, add(client.params, update), client)
        rows.append((found, client.data.targets[client.data.index].numpy()))
    before = state.server.params
    after = TrainingRound(experiment, state).server_after(collector.collected)

    total = sum(weights)
    for name, value in before.items():  # eqs. 12 and 13
        parts = [(value + update[name]) * w for update, w in zip(updates, weights, strict=True)]
        expected = sum(parts, torch.zeros(())) / total
        torch.testing.assert_close(after.params[name], expected, rtol=1e-5, atol=1e-6)
    kept = {len(set(labels)) for _, labels in rows}
    assert kept == {2}  # of three classes: someone lacks each
    for place, label in enumerate(experiment.task(0).classes):  # eqs. 7, 8, 14 and 15
        have = [(x[y == label], w) for (x, y), w in zip(rows, weights, strict=True)]
        have = [(x, w) for x, w in have if len(x)]
        omega = sum(w for _, w in have)
        mean = sum(w * x.mean(0) for x, w in have) / omega
        square = sum(w * (x.mean(0) ** 2 + x.var(0)) for x, w in have) / omega
        prototypes = after.state.prototypes
        assert prototypes.there[place] == 1
        np.testing.assert_allclose(prototypes.mean[place], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            prototypes.variance[place], square - mean**2, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("first", [2, 50])
def test_weights_do_not_grow_with_the_rounds_and_no_mean_is_changed(first: int) -> None:
    """A client that takes part always: rho is the number of rounds, in which sums must fit."""
    train = {"rounds": [first, 2]}
    experiment = build_experiment(parse(small({"kind": "pip"}, train=train)))
    state, found = begun(experiment), []
    client = clients_of(experiment, state)[0]
    for task, number in ((0, 0), (0, 1), (1, 0), (1, 1)):
        state.task, state.round = task, number
        rounds = task * first + number + 1
        scale = participation_scale(experiment.context(state))
        assert scale & (scale - 1) == 0  # a power of two: exact
        found.append(rounds / scale)
    assert all(1 <= rho < 2 for rho in found)
    heavy, light = (
        sent(experiment, replace(client, state=PipClientState(rho))).fields["update"]
        for rho in (3, 0)
    )
    assert isinstance(heavy, Sum)
    assert isinstance(light, Sum)
    assert heavy.weight == 4 * (light.weight or 0) == 4 * len(client.data)


def test_no_weight_of_a_run_is_above_what_needs_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long first task too; secure sums have room for the promise alone."""
    ratios, upload = [], Pip.upload

    def recorded(self: Pip, client: Client, local: LocalUpdate) -> ClientResult:
        result = upload(self, client, local)
        ratios.append((result.fields["update"].weight or 0) / len(client.data))
        return result

    monkeypatch.setattr(Pip, "upload", recorded)
    train = {"rounds": [20, 1], "max_steps": 1}
    stream = {"kind": "split", "tasks": 3, "classes_per_task": 3}
    experiment = build_experiment(parse(small({"kind": "pip"}, train=train, stream=stream)))
    run_stream(experiment, experiment.initial_state(), lambda *_: None)
    assert len(ratios) == 22 * 3
    assert max(ratios) < experiment.needs.max_client_weight


def test_without_weights_it_is_the_plain_mean() -> None:
    experiment = experiment_of(weighted=False)
    client = replace(clients_of(experiment, begun(experiment))[0], state=PipClientState(5))
    fields = sent(experiment, client).fields
    assert {field.weight for field in fields.values() if isinstance(field, Sum)} == {1.0}


@pytest.mark.parametrize("weighted", [True, False])
def test_secure_sums_have_room_for_twice_the_rows_or_for_one(weighted: bool) -> None:
    """Omega is less than twice the rows of a client; the plain mean has weights of one."""
    most = int(2 * experiment_of().task(0).partition.sizes.max()) if weighted else 1
    privacy = {"secagg": True, "bits": 32, "precision": 30}
    with pytest.raises(UserError, match=f"3 clients per round and weights up to {most}, got 30$"):
        build_experiment(parse(small({"kind": "pip", "weighted": weighted}, privacy=privacy)))


def test_participations_are_counted_over_tasks() -> None:
    experiment = experiment_of()
    run_stream(experiment, experiment.initial_state(), lambda *_: None)
    kept = [experiment.client_state(client)[0] for client in range(3)]
    assert kept == [PipClientState(rho=4)] * 3


def test_a_class_that_nobody_reports_keeps_its_prototype() -> None:
    experiment = experiment_of()
    state = begun(experiment, rounds=1)
    before = state.server.state.prototypes
    context, collector = experiment.context(state), UploadCollector()
    client = clients_of(experiment, state)[0]
    done = sent(experiment, replace(client, context=replace(context, round=0)), {})
    collector.add(stack_of_one(0, 1.0, {**done.fields, "update": Sum(random_update(client))}))
    after = TrainingRound(experiment, state).server_after(collector.collected).state.prototypes
    (lacking,) = set(experiment.task(0).classes) - set(experiment.task(0).classes_of(0))
    at = experiment.task(0).classes.index(lacking)
    torch.testing.assert_close(after.mean[at], before.mean[at])
    others = [place for place in range(3) if place != at]
    assert not torch.allclose(after.mean[others], before.mean[others])


def test_prototypes_are_reset_in_each_task_and_count_from_its_second_round() -> None:
    experiment = experiment_of()
    state = begun(experiment)
    first = prepared(experiment, clients_of(experiment, state)[0]).tensors
    assert first["points"].shape == (2, 0, 8)
    train_round(experiment, state)
    second = prepared(experiment, clients_of(experiment, state)[0]).tensors
    assert second["points"].shape == (2, 9, 8)  # three classes, each with two augmentations
    assert second["labels"].tolist() == list(experiment.task(0).classes) * 3
    train_round(experiment, state)
    state.task, state.round = 1, 0
    begin_task(experiment, state)
    assert not state.server.state.prototypes.there.any()


def test_prototypes_are_augmented_differently_in_each_epoch() -> None:
    """Line 23 of Algorithm 1: the means stay, what is drawn around them does not."""
    experiment = experiment_of()
    client = clients_of(experiment, begun(experiment, rounds=1))[0]
    own = prepared(experiment, client).tensors
    means, drawn = own["points"][:, :3], own["points"][:, 3:]
    shared = client.broadcast["prototypes"]
    torch.testing.assert_close(means, shared["mean"].expand(2, 3, 8))
    assert not torch.isclose(drawn[0], drawn[1]).any()
    beta = (drawn - shared["mean"].repeat(2, 1)) / shared["variance"].sqrt().repeat(2, 1)
    assert ((beta > -1e-4) & (beta < 1 + 1e-4)).all()
    losses = [
        injected_loss(experiment, client, own, client.params, torch.tensor(epoch))
        for epoch in (0, 1)
    ]
    swapped = own | {"points": own["points"].flip(0)}
    again = injected_loss(experiment, client, swapped, client.params, torch.tensor(1))
    assert losses[0] != losses[1]
    assert losses[0] == again


def test_a_class_without_a_prototype_is_not_injected() -> None:
    experiment = experiment_of()
    client = clients_of(experiment, begun(experiment, rounds=1))[0]
    shared = client.broadcast["prototypes"] | {"there": torch.tensor([1.0, 0.0, 1.0])}
    changed = replace(client, broadcast={**client.broadcast, "prototypes": shared})
    own = prepared(experiment, changed).tensors
    first, _, third = experiment.task(0).classes
    assert own["labels"].tolist() == [first, third] * 3
    torch.testing.assert_close(own["points"][1, :2], shared["mean"][[0, 2]])


def injected_loss(
    experiment: Experiment,
    client: Client,
    own: Tensors,
    params: Tensors,
    epoch: torch.Tensor | None = None,
) -> torch.Tensor:
    batch = replace(client.data.batch(client.data.index[:6]), epoch=epoch)
    return step_loss(experiment, client, batch, own, params)


def test_injection_is_equation_9_and_moves_the_head_alone() -> None:
    """The loss over 6 rows and 9 prototypes is the mean over 15 rows."""
    experiment = experiment_of(**{"lambda": 0.0})
    client = clients_of(experiment, begun(experiment, rounds=1))[0]
    own, params = prepared(experiment, client).tensors, client.params
    found = injected_loss(experiment, client, own, params)

    x = head_inputs(experiment, params, client)[:6]
    y = client.data.targets[client.data.index[:6]].numpy()
    x = np.concatenate([x, own["points"][0].double().numpy()])
    y = np.concatenate([y, own["labels"].numpy()])
    logits = x @ params["head.weight"].double().numpy().T + params["head.bias"].double().numpy()
    classes = list(experiment.task(0).classes)
    among = np.exp(logits[:, classes])
    chosen = np.exp(logits[np.arange(15), y]) / among.sum(1)
    assert float(found) == pytest.approx(-np.log(chosen).mean(), rel=1e-4)

    def gradients(own: Tensors) -> Tensors:
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        injected_loss(experiment, client, own, leaves).backward()
        return {n: v.grad if v.grad is not None else torch.zeros_like(v) for n, v in leaves.items()}

    none = {**own, "points": own["points"][:, :0], "labels": own["labels"][:0]}
    with_them, without = gradients(own), gradients(none)
    # the prototypes dilute the rows' mean from 6 to 15, and do nothing else to the prompts
    torch.testing.assert_close(with_them["prompt.pool"], without["prompt.pool"] * 6 / 15)
    torch.testing.assert_close(with_them["prompt.general"], without["prompt.general"] * 6 / 15)
    assert not torch.allclose(with_them["head.weight"], without["head.weight"] * 6 / 15)


def test_the_matching_loss_is_unchanged_by_prototypes() -> None:
    """Over the rows alone: a prototype has no query."""
    losses = []
    for weight in (0.0, 0.4):
        experiment = experiment_of(**{"lambda": weight})
        client = clients_of(experiment, begun(experiment))[0]
        own = prepared(experiment, client).tensors
        drawn = torch.rand(
            1, 9, own["points"].shape[-1], generator=torch.Generator().manual_seed(1)
        )
        labels = torch.tensor(experiment.task(0).classes).repeat(3)
        own |= {"points": drawn, "labels": labels}
        losses.append(float(injected_loss(experiment, client, own, client.params)))
    body, batch = experiment.network.body, client.data.batch(client.data.index[:6])
    assert isinstance(body, Prompted)
    key = client.params["prompt.keys"][0].double().numpy()
    queries = body.query(batch.x, ForwardPass()).double().numpy()
    cosines = queries @ key / np.linalg.norm(queries, axis=1) / np.linalg.norm(key)
    assert abs(cosines.mean()) > 0.01
    assert losses[0] - losses[1] == pytest.approx(0.4 * cosines.mean(), rel=1e-3)


def test_before_the_first_prototypes_the_loss_is_the_baselines() -> None:
    pip, baseline = experiment_of(), build_experiment(parse(small({"kind": "fed-dualp"})))
    losses = []
    for experiment in (pip, baseline):
        client = clients_of(experiment, begun(experiment))[0]
        own = prepared(experiment, client).tensors
        losses.append(injected_loss(experiment, client, own, client.params))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("name", TABLE_5)
def test_the_configurations_of_table_5(name: str) -> None:
    """Each part shows where it should and nowhere else."""
    parts = {"prototypes": True, "weighted": True, "average_head": "every_round"} | TABLE_5[name]
    experiment = experiment_of(**TABLE_5[name])
    state = begun(experiment)
    before = state.server.params
    train_round(experiment, state)
    assert ("up/prototypes" in state.ledger.by_field) == parts["prototypes"]
    client = replace(clients_of(experiment, state)[0], state=PipClientState(1))
    done = sent(experiment, client)
    omega = 2.0 * len(client.data) / 2  # by the second round, the power of two that is reached
    assert done.fields["update"].weight == (omega if parts["weighted"] else 1.0)
    assert done.state.head == {}
    never = parts["average_head"] == "never"
    assert ("head.weight" in experiment.plan(state).sent) != never
    changed = not torch.equal(state.server.params["head.weight"], before["head.weight"])
    assert changed != never
    assert experiment.is_personal(state) == never


def test_heads_are_sent_in_a_tasks_last_round_alone() -> None:
    experiment = experiment_of(average_head="task_end")
    client = clients_of(experiment, begun(experiment, rounds=1))[0]
    inside = replace(client, context=replace(client.context, rounds=9))
    update = sent(experiment, inside).fields["update"].value
    assert "head.weight" not in update
    done = sent(experiment, client)
    assert "head.weight" in done.fields["update"].value
    assert done.state is not None
    assert done.state.head


def test_a_client_continues_with_its_stored_head() -> None:
    experiment = experiment_of(average_head="task_end")
    client = clients_of(experiment, begun(experiment))[0]
    assert prepared(experiment, client).initial_params == {}
    update = random_update(client)
    kept = sent(experiment, client, update).state
    assert kept is not None
    after = prepared(experiment, replace(client, state=kept)).initial_params
    assert set(after) == {"head.weight", "head.bias"}
    torch.testing.assert_close(
        after["head.weight"], client.params["head.weight"] + update["head.weight"]
    )
    context = replace(client.context, task=1, network=experiment.network_at(1))
    later = replace(client, state=kept, context=context)
    assert prepared(experiment, later).initial_params == {}
    shared = experiment_of()
    other = replace(clients_of(shared, begun(shared))[0], state=kept)
    assert prepared(shared, other).initial_params == {}


@pytest.mark.parametrize(("augment", "floats"), [(0, 10 * 768 + 10), (2, 2 * 10 * 768 + 10)])
def test_prototypes_have_the_size_of_the_papers_table(augment: int, floats: int) -> None:
    """0.03 MB for the means of ten classes (Table 1), as the ledger counts it."""
    value = Gaussians.empty(10, 768).summands(with_variance=augment > 0)
    header = 400
    assert 4 * floats <= encoded_size(value) <= 4 * floats + header
    experiment = experiment_of(augment=augment)
    state = begun(experiment, rounds=1)
    mine = 3 * 8 * (2 if augment else 1) + 3
    for way in ("up", "down"):
        assert 4 * mine <= state.ledger.by_field[f"{way}/prototypes"] / 3 <= 4 * mine + header


def test_the_ledger_counts_prompts_keys_and_head_and_nothing_else() -> None:
    experiment = experiment_of()
    state = begun(experiment, rounds=1)
    count = sum(value.numel() for value in state.server.params.values())
    for way in ("up/update", "down/params"):
        each = state.ledger.by_field[way] / 3
        assert 4 * count <= each <= 4 * count + 600
    assert set(state.ledger.by_field) == {
        "up/update", "up/prototypes", "down/params", "down/prototypes",
    }  # fmt: skip


def test_prediction_needs_no_prototypes() -> None:
    state = PipServerState(2, Gaussians.empty(1, 1))
    assert prediction_state(Pip(), state) == {"seen": 2}


def test_lambda_defaults_to_that_of_the_prompts() -> None:
    found = [
        build({"kind": "pip", **more})
        for more in ({}, {"prompt": "l2p"}, {"prompt": "l2p", "lambda": 0.7})
    ]
    assert [method.matching for method in found if isinstance(method, Pip)] == [1.0, 0.1, 0.7]


def test_sums_that_nobody_can_look_into_are_enough() -> None:
    pytest.importorskip("cryptography")
    found = []
    for secagg in (False, True):
        values = small({"kind": "pip"})
        experiment = build_experiment(parse({**values, "privacy": {"secagg": secagg}}))
        found.append(begun(experiment, rounds=2).server)
    for name, value in found[0].params.items():
        torch.testing.assert_close(value, found[1].params[name], rtol=1e-3, atol=1e-3)
    for name, value in found[0].state.prototypes.tree().items():
        other = found[1].state.prototypes.tree()[name]
        torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-3)
