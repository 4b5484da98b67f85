"""STAMP: its equations by hand, its switches, and its memory within a run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from stamp_runs import config, finished
from torch.nn import functional as F

import perdure
from perdure.algebra.alignment import Alignment, SearchSettings
from perdure.algebra.coresets import prototypical_loss
from perdure.contract import Batch, Each, LocalUpdate, Rows, Step, Sum
from perdure.contract.step import join_rows, mean_loss
from perdure.core.errors import UserError
from perdure.methods.parts.coreset import CoresetLoss, CoresetMemory, coreset_active_outputs
from perdure.methods.stamp import Stamp
from perdure.models.ops import ForwardPass

OFF = {"kind": "stamp", "spatial": False, "temporal": False, "protonet": "none"}


def a_client(method=None, task=2, **changes):
    """A client at its third task, with a memory of two."""
    experiment, state = finished(config(method, **changes))
    state.task, state.round = task, 0
    context = experiment.context(state)
    client = experiment.client(0, context, state.server, {"params": state.server.params})
    return replace(client, state=only_tasks(client.state, range(task)))


def only_tasks(memory, tasks):
    """A memory with the examples of some tasks."""
    examples = memory.examples
    rows = torch.isin(examples.tasks, torch.tensor(list(tasks)))
    fields = {name: getattr(examples, name)[rows] for name in ("rows", "targets", "tasks")}
    return replace(memory, examples=replace(examples, **fields))


def stored(client, task):
    """A client's stored examples of one task: inputs, outputs, and a mask of ones."""
    examples = client.state.examples
    rows = (examples.tasks == task).nonzero().squeeze(1)
    x = examples.rows[rows].float() * examples.scale[task] + examples.shift[task]
    return x.view(-1, *client.data.examples.shape), examples.targets[rows], torch.ones(len(rows))


# ---- equations


def forward(params, x):
    """The small net of these tests, written out."""
    hidden = F.relu(F.linear(x.flatten(1), params[names[0]], params[names[1]]))
    return hidden, F.linear(hidden, params["head.weight"], params["head.bias"])


names = ["layers.0.weight", "layers.0.bias"]


@pytest.fixture(scope="module")
def client():
    found = a_client()
    names[:] = [name for name in found.params if not name.startswith("head")]
    return found


def by_hand(params, x, y, gradients):
    """The loss of one task's memory: of every example, or of every class's mean (eq. 3)."""
    features, logits = forward(params, x)
    if gradients == "prototype":
        classes = y.unique()
        means = torch.stack([features[y == c].mean(0) for c in classes])
        logits, y = F.linear(means, params["head.weight"], params["head.bias"]), classes
    return F.cross_entropy(logits, y)


def memory_loss(client, gradients):
    return CoresetLoss(client.context.network, ForwardPass(), gradients)


@pytest.mark.parametrize("gradients", ["prototype", "sample"])
def test_equation_3_by_hand(client, gradients):
    x, y, mask = stored(client, 0)
    x, y, mask = x[:-2], y[:-2], mask[:-2]  # classes of different sizes
    mine = memory_loss(client, gradients)(client.params, x, y, mask)
    torch.testing.assert_close(mine, by_hand(client.params, x, y, gradients))


@pytest.mark.parametrize("gradients", ["prototype", "sample"])
def test_padding_of_a_memory_does_not_count(client, gradients):
    loss, (x, y, mask) = memory_loss(client, gradients), stored(client, 0)
    padded_x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, 3), value=7.0)
    padded_y, padded_mask = F.pad(y, (0, 3)), F.pad(mask, (0, 3))
    torch.testing.assert_close(
        loss(client.params, padded_x, padded_y, padded_mask), loss(client.params, x, y, mask)
    )


def an_update(client, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.01 * torch.randn(value.shape, generator=generator)
        for name, value in client.params.items()
    }


def sent_fields(method, clients, updates):
    """What clients send, as fields with a leading client axis."""
    stack = {name: torch.stack([update[name] for update in updates]) for name in updates[0]}
    return method.align_gradients(clients, LocalUpdate(stack, {})).fields


def sent_update(method, client, update):
    """The update that one client sends."""
    value = sent_fields(method, [client], [update])["update"].value
    return {name: stack[0] for name, stack in value.items()}


@pytest.mark.parametrize("gradients", ["prototype", "sample"])
def test_the_sent_update_is_the_alignment_of_the_tasks(client, gradients):
    method, update = Stamp(eta=1.5, kappa=0.3, gradients=gradients), an_update(client)
    sent = sent_update(method, client, update)
    leaves = {
        name: (client.params[name] + value).requires_grad_() for name, value in update.items()
    }
    rows = []
    for task in (0, 1):
        loss = by_hand(leaves, *stored(client, task)[:2], gradients)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        rows.append(-torch.cat([g.flatten() for g in grads]))
    rows.append(torch.cat([value.flatten() for value in update.values()]))
    g = torch.stack(rows).double().numpy()
    g *= np.linalg.norm(g[-1]) / np.linalg.norm(g, axis=1, keepdims=True)
    wanted = 1.5 * Alignment(0.3, "none").coefficients(g @ g.T) @ g
    mine = torch.cat([sent[name].flatten() for name in update])
    np.testing.assert_allclose(mine, wanted, atol=2e-6)


def test_without_normalization_past_gradients_are_as_long_as_a_step(client):
    """Past directions are -lr times gradients, which counts only if they are not normalized."""
    method, update = Stamp(budget=5, eta=1.0, kappa=0.0, normalize=False), an_update(client)
    sent = sent_update(method, client, update)
    leaves = {
        name: (client.params[name] + value).requires_grad_() for name, value in update.items()
    }
    losses = [by_hand(leaves, *stored(client, task)[:2], "sample") for task in (0, 1)]
    grads = torch.autograd.grad(sum(losses), list(leaves.values()))
    for grad, (name, value) in zip(grads, update.items(), strict=True):
        torch.testing.assert_close(sent[name], (value - client.context.lr * grad) / 3)


def test_stacked_clients_send_the_same_as_single_ones(client):
    """Clients with two past tasks, with one and with none."""
    younger = only_tasks(client.state, [1])
    clients = [
        client,
        replace(client, state=CoresetMemory()),
        replace(client, state=younger),
        client,
    ]
    updates = [an_update(client, seed) for seed in range(4)]
    method = Stamp(diagnostics=True)
    together = sent_fields(method, clients, updates)
    for row, (one, update) in enumerate(zip(clients, updates, strict=True)):
        alone = sent_fields(method, [one], [update])
        for field, part in together.items():
            for name, value in part.value.items():
                torch.testing.assert_close(value[row], alone[field].value[name][0])
    assert together["conflicts"].value["pairs"].tolist() == [3, 0, 1, 3]


def test_an_update_that_is_not_finite_stays_so(client):
    update = an_update(client)
    update["head.bias"][0] = float("nan")
    sent = sent_update(Stamp(budget=5), client, update)
    assert torch.isnan(sent["head.bias"]).any()


def test_a_client_without_a_past_sends_its_own_update(client):
    alone, update = replace(client, state=CoresetMemory()), an_update(client)
    sent = sent_update(Stamp(), alone, update)
    for name, value in update.items():
        torch.testing.assert_close(sent[name], value, rtol=0, atol=0)


def a_step(client):
    """A step of eight rows, and its parameters as leaves."""
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(8, 1, 8, 8, generator=generator), torch.arange(8) % 2)
    leaves = {name: value.clone().requires_grad_() for name, value in client.params.items()}
    return Step(
        leaves, batch, {}, {}, torch.tensor(0), client.context.network, ForwardPass()
    ), leaves


def test_the_encoder_variant_keeps_cross_entropy_from_the_body(client):
    step, leaves = a_step(client)
    train = Stamp(protonet="encoder", protonet_weight=1.0).exchanges(client.context)[0]
    loss = mean_loss("loss", train.loss(step), step)
    loss = loss + mean_loss("penalty", train.penalty(step), step)
    found = torch.autograd.grad(loss, [leaves[names[0]], leaves["head.weight"]])
    features, logits = forward(leaves, step.batch.x)
    near = prototypical_loss(features, step.batch.y, None, 10)
    torch.testing.assert_close(found[0], torch.autograd.grad(near, leaves[names[0]])[0])
    cross = F.cross_entropy(logits, step.batch.y)
    torch.testing.assert_close(found[1], torch.autograd.grad(cross, leaves["head.weight"])[0])


def test_the_prototypical_loss_is_added_to_any_loss(client):
    """It leaves the loss to other methods of a combination."""
    step, leaves = a_step(client)
    train = Stamp(protonet_weight=0.3).exchanges(client.context)[0]
    assert train.loss is None
    near = prototypical_loss(forward(leaves, step.batch.x)[0], step.batch.y, None, 10)
    torch.testing.assert_close(train.penalty(step).value, 0.3 * near)


def test_the_prototypical_loss_sees_rows_that_other_methods_add(client):
    step, leaves = a_step(client)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 1, 8, 8, generator=generator), torch.tensor([0, 5, 5, 7])
    joined = join_rows(step, Rows(x, y, torch.tensor([1.0, 1.0, 1.0, 0.0])))
    found = Stamp(protonet_weight=1.0).prototypical_loss(joined).value
    rows = torch.cat([x[:3], step.batch.x])  # the last added row does not count
    features = forward(leaves, rows)[0]
    wanted = prototypical_loss(features, torch.cat([y[:3], step.batch.y]), None, 10)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("outputs", "wanted"),
    [("task", [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]), ("seen", [[1] * 6, [1] * 6])],
)
def test_outputs_in_the_loss_of_past_tasks_are_those_of_training(outputs, wanted):
    stream = {"kind": "split", "tasks": 3, "classes_per_task": 2}
    train = {"rounds": 1, "batch_size": 16, "outputs": outputs}
    growing = {"hidden": [12], "head": "growing"}
    client = a_client(stream=stream, model=growing, train=train)
    assert coreset_active_outputs([client]).int().tolist() == [wanted]


# ---- switches


def test_parts_that_are_off_leave_their_functions_to_others(client):
    first = replace(client.context, task=0)
    for method, context in ((Stamp(), first), (Stamp(temporal=False), client.context)):
        assert method.exchanges(context)[0].make_upload is None
    train = Stamp(spatial=False, protonet="none").exchanges(client.context)[0]
    assert (train.loss, train.penalty, train.combine, train.adjust) == (None, None, None, None)
    assert len(Stamp(temporal=False).exchanges(client.context)) == 1


def test_nothing_travels_for_the_coreset(client):
    coreset = Stamp().exchanges(client.context)[1]
    assert not coreset.communicates
    assert coreset.client_work(client).fields == {}


def test_with_every_part_off_it_is_fedavg():
    mine = perdure.run(config(OFF)).values
    plain = perdure.run(config(method={"kind": "fedavg"})).values
    assert mine["model_sha256"] == plain["model_sha256"]
    assert mine["bytes"] == plain["bytes"]


def test_with_the_server_alone_it_is_fedomg():
    mine = perdure.run(config(OFF | {"spatial": True})).values
    other = perdure.run(config(method={"kind": "fedomg"})).values
    assert mine["model_sha256"] == other["model_sha256"]


def test_uploads_are_those_of_fedavg():
    mine = perdure.run(config()).values["bytes"]
    plain = perdure.run(config(method={"kind": "fedavg"})).values["bytes"]
    assert mine | {"types": {"update": "Sum"}, "kept": plain["kept"]} == plain
    assert mine["types"] == {"update": "Each"}


@pytest.mark.parametrize(("spatial", "kind"), [(True, Each), (False, Sum)])
def test_the_server_sees_single_updates_only_if_it_aligns_them(client, spatial, kind):
    method = Stamp(spatial=spatial, diagnostics=True)
    fields = sent_fields(method, [client], [an_update(client)])
    assert {name: type(part) for name, part in fields.items()} == {"update": kind, "conflicts": Sum}
    assert method.needs.per_client_fields == (("update",) if spatial else ())


def test_without_the_server_only_sums_are_sent():
    found = perdure.run(config({"spatial": False, "diagnostics": True})).values["bytes"]["types"]
    assert found == {"update": "Sum", "conflicts": "Sum"}


def test_alignment_uses_the_authors_recipe_on_clients():
    assert Stamp(client_kappa=0.25, solver="published").client_alignment == Alignment(
        0.25, "last", "published", "published", "model", SearchSettings(momentum=0.1, steps=25)
    )


SHORT = {"rounds": 1, "batch_size": 16, "max_steps": 3}
VARIANTS = [
    {},
    {"protonet": "encoder", "scope": "layer", "selection": "matching"},
    {"spatial": False, "gradients": "sample", "selection": "random", "protonet": "none"},
    {"solver": "published", "selection": "literal", "normalize": False},
]


@pytest.mark.parametrize("method", VARIANTS)
def test_engines_agree(method):
    serial, vector = (
        finished(config(method, engine, train=SHORT))[1].server.params
        for engine in ("serial", "vector")
    )
    for name, value in serial.items():
        torch.testing.assert_close(value, vector[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": {"kind": "permuted", "tasks": 3}},
        {"stream": {"kind": "split", "tasks": 3, "classes_per_task": 2}},
        {
            "stream": {"kind": "split", "tasks": 3, "classes_per_task": 2},
            "model": {"head": "growing", "hidden": [12]},
        },
        {"stream": {"kind": "pool", "tasks": 3, "classes_per_task": 2, "presence": 0.7}},
    ],
)  # fmt: skip
def test_streams_and_absent_clients(changes):
    serial, vector = (
        finished(config(None, engine, train=SHORT, **changes))[1].server.params
        for engine in ("serial", "vector")
    )
    for name, value in serial.items():
        assert torch.isfinite(value).all()
        torch.testing.assert_close(value, vector[name], atol=1e-5, rtol=0)


# ---- what is seen and refused


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_diagnostics_on_request(tmp_path, engine):
    perdure.run(config({"diagnostics": True}, engine), out=tmp_path / "a")
    lines = (tmp_path / "a" / "events.jsonl").read_text().splitlines()
    seen = [json.loads(line)["method"] for line in lines]
    for number in ("cosine", "conflicts"):
        assert -1 <= seen[-1]["tasks"][number] <= 1
        assert -1 <= seen[-1]["clients"][number] <= 1
        assert seen[0]["tasks"][number] is None  # the first task has no other to compare with


@pytest.mark.parametrize(
    ("key", "bad"), [("budget", 0), ("eta", 0), ("selection", "luck"), ("protonet", True)]
)
def test_bad_values_are_refused_by_name(key, bad):
    with pytest.raises(UserError, match=f"method.{key}: must be .*, got {bad!r}"):
        perdure.run(config({key: bad}))
