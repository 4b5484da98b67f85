"""Validation rows: held out by every client, in every task, and never trained on."""

import numpy as np
import pytest
import torch

import perdure
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.streams import make_stream
from perdure.data.streams.build import held_out_rows

PARTITIONS = [
    {"kind": "iid"},
    {"kind": "dirichlet", "alpha": 0.1},
    {"kind": "shards"},
    {"kind": "classes", "fraction": 0.5},
]
SHORT = {
    "stream": {"tasks": 2},
    "clients": {"count": 3},
    "train": {"rounds": 1, "max_steps": 2},
    "engine": {"kind": "serial"},
}


def stream_of(validation=0.2, kind="permuted", partition=None, **values):
    return make_stream(
        parse(
            {
                "seed": 5,
                "data": {"source": "digits", "validation": validation},
                "stream": {"kind": kind, "tasks": 3},
                "clients": {"count": 6, "partition": partition or {"kind": "iid"}},
                **values,
            }
        ),
        Rng(5),
    )


def trained_rows(task):
    clients = range(len(task.partition.sizes))
    return {row for client in clients for row in task.partition.index(client).tolist()}


def validation_rows(task):
    return {row for group in task.on_validation().groups for row in group.index.tolist()}


@pytest.mark.parametrize("kind", ["permuted", "split", "pool"])
@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: p["kind"])
def test_no_row_is_both_trained_and_validated_in_any_task(kind, partition):
    tasks = stream_of(kind=kind, partition=partition).tasks
    trained = set().union(*map(trained_rows, tasks))
    validated = set().union(*map(validation_rows, tasks))
    assert validated
    assert not trained & validated


@pytest.mark.parametrize("kind", ["permuted", "split", "pool"])
def test_trained_and_validated_rows_are_all_rows_of_the_clients(kind):
    whole, divided = stream_of(0.0, kind).tasks, stream_of(0.2, kind).tasks
    for before, task in zip(whole, divided, strict=True):
        assert trained_rows(task) | validation_rows(task) == trained_rows(before)


def test_every_class_loses_the_same_fraction():
    labels = np.repeat([0, 1, 2], [100, 50, 7])
    held_out = held_out_rows(labels, 0.2, Rng(0)).numpy()
    assert np.bincount(labels[held_out]).tolist() == [20, 10, 1]


def test_the_draw_depends_on_the_seed_and_not_on_the_number_of_tasks():
    labels = np.arange(200) % 10
    draws = [held_out_rows(labels, 0.3, Rng(seed)).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_sizes_and_counts_are_those_of_the_rows_that_are_trained():
    task = stream_of(0.4, "split", {"kind": "dirichlet", "alpha": 0.1}).tasks[0]
    labels = task.train.y.numpy()
    indices = [task.partition.index(client) for client in range(6)]
    assert [len(index) for index in indices] == task.partition.sizes.tolist()
    counted = [np.bincount(labels[index.numpy()], minlength=10).tolist() for index in indices]
    assert task.partition.counts(labels, 10).tolist() == counted


def test_a_client_keeps_one_row_and_it_is_not_validated():
    values = {"data": {"source": "digits", "validation": 0.99, "limit": 300}}
    task = stream_of(**values, partition={"kind": "dirichlet", "alpha": 0.1}).tasks[0]
    assert task.partition.sizes.min() == 1
    assert not trained_rows(task) & validation_rows(task)


def test_a_group_of_a_pool_has_validation_rows_of_its_classes_alone():
    task = stream_of(kind="pool").tasks[1].on_validation()
    for group in task.groups:
        assert set(task.test.y[group.index].tolist()) <= set(group.classes)


def test_without_validation_a_stream_is_unchanged():
    (first, *_), (same, *_) = stream_of(0.0).tasks, stream_of(0.0).tasks
    assert first.validation == ()
    assert all(torch.equal(first.partition.index(c), same.partition.index(c)) for c in range(6))


def test_accuracy_on_validation_rows_is_that_of_the_trained_model_on_them():
    """Compared with a model whose test rows are the validation rows."""
    result = perdure.run({**SHORT, "data": {"validation": 0.3}}).values
    experiment = perdure.training.experiment.build_experiment(
        parse({**SHORT, "data": {"validation": 0.3}})
    )
    task = experiment.task(1)
    state = perdure.training.loop.run_stream(
        experiment, experiment.initial_state(), lambda *event: None
    )
    network, server = experiment.network_at(1), state.server
    rows = torch.tensor(sorted(validation_rows(task)))
    logits = experiment.method.predict(server, task.train.gather(rows), network)
    correct = (logits.argmax(1) == task.train.y[rows]).double().mean().item()
    assert result["validation"]["matrix"]["task_agnostic"][1][1] == pytest.approx(correct)
    assert result["validation"]["metrics"]["task_agnostic"]["ACC"] is not None


def test_without_validation_the_result_says_null():
    assert perdure.run(SHORT).values["validation"] is None


def test_a_resumed_run_has_the_same_validation(tmp_path):
    config = {**SHORT, "data": {"validation": 0.3}}
    whole = perdure.run(config).values["validation"]

    def stop(state, event):
        if event["event"] == "task":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perdure.run(config, out=tmp_path / "run", watch=stop)
    assert perdure.resume(tmp_path / "run").values["validation"] == whole


def test_a_fraction_that_holds_out_nothing_of_a_task_is_refused():
    config = {**SHORT, "data": {"limit": 30, "validation": 0.01}}
    with pytest.raises(UserError, match=r"data\.validation: must be 0, or enough to hold out rows"):
        perdure.run(config)


@pytest.mark.parametrize("value", [1.0, -0.1, True])
def test_a_fraction_out_of_range_is_refused(value):
    with pytest.raises(UserError, match=r"data\.validation: must be"):
        parse({"data": {"validation": value}})


def test_validation_of_one_domain_is_refused():
    domains = [{"source": "digits", "validation": 0.1}, {"source": "digits"}]
    with pytest.raises(UserError, match=r"data\.validation holds for all domains"):
        parse({"stream": {"kind": "domains", "domains": domains}})
