import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.partition import presence
from perdure.data.streams import make_stream
from perdure.data.streams.split import SplitStream, class_groups


def build(seed=0, **values):
    return make_stream(parse(values), Rng(seed))


def refused(word, **values):
    with pytest.raises(UserError) as caught:
        build(**values)
    assert word in str(caught.value)


def held(task, clients):
    return [task.partition.index(client) for client in range(clients)]


def save_set(path, rows=60, classes=4, shape=(5, 5), seed=0, **more):
    rng = np.random.default_rng(seed)
    np.savez(
        path,
        x_train=rng.integers(0, 256, (rows, *shape), dtype=np.uint8),
        y_train=np.arange(rows) % classes,
        x_test=rng.integers(0, 256, (rows // 2, *shape), dtype=np.uint8),
        y_test=np.arange(rows // 2) % classes,
        **more,
    )
    return str(path)


ALL = [
    {"kind": "permuted", "tasks": 3},
    {"kind": "split", "tasks": 3},
    {"kind": "split", "tasks": 3, "overlap": 1},
    {"kind": "pool", "tasks": 3},
]


@pytest.mark.parametrize("stream", ALL, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_what_holds_for_every_stream(stream, share):
    stream = build(stream=stream | {"presence": share})
    assert stream.shape == (1, 8, 8)
    assert stream.classes == 10
    for number, task in enumerate(stream.tasks):
        assert task.index == number
        sizes = task.partition.sizes
        for client, index in enumerate(held(task, 10)):
            assert len(index) == sizes[client]
            labels = set(task.train.y[index].tolist())
            assert labels <= set(task.classes_of(client)) <= set(task.classes)
            assert bool(labels) == bool(task.classes_of(client))
        for group in task.groups:
            labels = task.test.y[group.index]
            wanted = np.isin(task.test.y.numpy(), group.classes).sum()
            assert len(labels) == wanted > 0
            assert set(labels.tolist()) <= set(group.classes) <= set(task.classes)
            assert group.weight > 0
        assert task.train.gather(torch.arange(3)).shape == (3, 1, 8, 8)
        assert task.train.rows.data_ptr() == stream.tasks[0].train.rows.data_ptr()
    assert sum(int((task.partition.sizes > 0).sum()) for task in stream.tasks) == (
        30 if share == 1.0 else 18  # 6 of 10 clients in each of 3 tasks
    )


@pytest.mark.parametrize("stream", ALL, ids=str)
def test_a_stream_follows_its_seed(stream):
    a, b, c = (build(seed, stream=stream) for seed in (0, 0, 1))
    for x, y in zip(a.tasks, b.tasks, strict=True):
        assert torch.equal(x.train.gather(torch.arange(9)), y.train.gather(torch.arange(9)))
        assert all(torch.equal(i, j) for i, j in zip(held(x, 10), held(y, 10), strict=True))
        assert x.classes == y.classes
    last, other = a.tasks[-1], c.tasks[-1]
    assert not all(torch.equal(i, j) for i, j in zip(held(last, 10), held(other, 10), strict=True))


def test_permuted_tasks_are_one_image_in_several_orders():
    first, second, third = build(stream=ALL[0]).tasks
    index = torch.arange(20)
    x, y, z = (task.test.gather(index).flatten(1) for task in (first, second, third))
    assert not torch.equal(x, y)
    assert not torch.equal(y, z)
    assert torch.equal(x.sort(dim=1).values, y.sort(dim=1).values)
    assert first.train.permutation is None
    assert torch.equal(x[:, second.train.permutation], y)
    assert torch.equal(second.train.permutation, second.test.permutation)
    for client in range(10):
        assert torch.equal(first.partition.index(client), third.partition.index(client))


def test_split_tasks_are_disjoint_and_in_a_random_order():
    tasks = build(stream={"kind": "split", "tasks": 5}).tasks
    groups = [task.classes for task in tasks]
    assert sorted(sum(groups, ())) == list(range(10))
    assert groups != [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert groups != [t.classes for t in build(1, stream={"kind": "split", "tasks": 5}).tasks]
    for task in tasks:
        rows = torch.cat(held(task, 10)).sort().values
        assert torch.equal(
            rows, torch.isin(task.train.y, torch.tensor(task.classes)).nonzero().flatten()
        )


@given(st.integers(1, 8), st.integers(0, 4), st.integers(1, 60))
@settings(deadline=None)
def test_neighbours_share_exactly_the_overlap(tasks, overlap, classes):
    stream = SplitStream(tasks=tasks, overlap=overlap)
    # each task but the last adds at least one new class to the overlap
    if tasks > classes or (tasks > 1 and tasks + overlap > classes):
        with pytest.raises(UserError, match=r"stream\.(tasks|overlap)"):
            class_groups(np.arange(classes), stream)
        return
    groups = class_groups(np.arange(classes), stream)
    assert len(groups) == tasks
    assert len(set().union(*groups)) == sum(map(len, groups)) - (tasks - 1) * overlap
    for a, b in itertools.pairwise(groups):
        assert len(set(a) & set(b)) == overlap
        assert len(a) == len(b) > overlap


def test_classes_that_no_task_has_are_said(caplog):
    def said(**stream):
        caplog.clear()
        class_groups(np.arange(10), SplitStream(**stream))
        return caplog.text

    assert "3 tasks of 3 classes leave 1 of the 10 classes unused" in said(tasks=3)
    assert not said(tasks=5)
    assert not said(tasks=3, overlap=1)  # 4 + 3 + 3
    assert not said(tasks=2, classes_per_task=3)  # as the config asks


def test_impossible_splits():
    refused(
        "stream.classes_per_task: must be 1 to 2 (10 classes, 5 tasks, overlap 0), got 3",
        stream={"kind": "split", "classes_per_task": 3},
    )
    refused(
        "stream.classes_per_task: must be 1 to 10 (10 classes, 1 tasks, overlap 0), got 11",
        stream={"kind": "split", "tasks": 1, "classes_per_task": 11},
    )
    expected = "stream.tasks: must be 1 to 10, the number of classes, got 11"
    refused(expected, stream={"kind": "split", "tasks": 11})
    refused(
        "stream.overlap: must be 0 to 1 (2 classes in a task), got 2",
        stream={"kind": "split", "classes_per_task": 2, "overlap": 2},
    )
    refused(
        "stream.overlap: unknown key for kind 'pool', got 1", stream={"kind": "pool", "overlap": 1}
    )
    refused(
        "stream.classes_per_task: must be 1 to 3 (10 classes, 3 tasks, overlap 0), got 4",
        stream={"kind": "pool", "tasks": 3, "classes_per_task": 4},
    )
    refused("clients.count", stream={"kind": "split"}, clients={"count": 400})


def test_labels_that_never_occur_are_in_no_task(tmp_path):
    names = np.array(list("abcdef"))
    path = save_set(tmp_path / "a.npz", class_names=names)
    stream = build(data={"source": "npz", "path": path}, stream={"kind": "split", "tasks": 2})
    assert stream.class_names == tuple("abcdef")
    assert sorted(stream.tasks[0].classes + stream.tasks[1].classes) == [0, 1, 2, 3]


def test_pool_clients_have_sequences_of_their_own():
    stream = build(stream={"kind": "pool", "tasks": 5}, clients={"count": 20})
    paths = [[task.classes_of(client) for task in stream.tasks] for client in range(20)]
    for path in paths:
        assert sorted(sum(path, ())) == list(range(10))
    assert len({tuple(path) for path in paths}) > 15
    for client in range(20):  # over all tasks, each of its rows once
        rows = torch.cat([task.partition.index(client) for task in stream.tasks])
        assert len(rows.unique()) == len(rows)
    everything = torch.cat([torch.cat(held(task, 20)) for task in stream.tasks])
    assert torch.equal(everything.sort().values, torch.arange(len(stream.tasks[0].train)))


def test_pool_groups_weigh_the_clients_that_have_them():
    stream = build(stream={"kind": "pool", "tasks": 5, "presence": 0.6}, clients={"count": 40})
    for task in stream.tasks:
        owned = [task.classes_of(client) for client in range(40) if task.partition.sizes[client]]
        assert {g.classes: g.weight for g in task.groups} == {c: owned.count(c) for c in owned}
        assert len(task.groups) == len({g.classes for g in task.groups})
        assert [g.classes for g in task.groups[:2]] == [task.groups[i].classes for i in (0, 1)]
        table = task.partition.counts(task.train.y.numpy(), 10)
        assert np.array_equal(table.sum(1) * (task.partition.sizes > 0), task.partition.sizes)


def test_pool_with_overlapping_class_shares():
    partition = {"kind": "classes", "fraction": 0.5}
    stream = build(stream={"kind": "pool", "tasks": 2}, clients={"partition": partition})
    for task in stream.tasks:
        for client, index in enumerate(held(task, 10)):
            assert len(index) == task.partition.sizes[client]


def who_sees(task, clients, share, seed=0):
    values = {"stream": {"presence": share}, "clients": {"count": clients}}
    return presence(parse(values), task, Rng(seed))


@given(st.integers(0, 12), st.integers(1, 30), st.floats(0.01, 1.0), st.integers(0, 99))
@settings(deadline=None)
def test_presence(task, clients, share, seed):
    there = who_sees(task, clients, share, seed)
    count = max(1, round(share * clients))
    assert (there is None) == (count == clients)
    if there is not None:
        assert (there.dtype, there.shape, there.sum()) == (bool, (clients,), count)


def test_all_see_every_task_unless_the_config_says_otherwise():
    assert all(who_sees(task, 7, 1.0) is None for task in range(5))
    assert presence(parse({}), 0, Rng(0)) is None


def test_a_client_sees_its_share_of_the_tasks_on_average():
    table = np.stack([who_sees(task, 10, 0.6) for task in range(2000)])
    assert np.allclose(table.mean(0), 0.6, atol=0.05)
    together = (table[:, 0] & table[:, 1]).mean()
    assert abs(together - 6 / 10 * 5 / 9) < 0.05
    one_after_the_other = (table[1:, 0] & table[:-1, 0]).mean()
    assert abs(one_after_the_other - 0.36) < 0.05


def test_more_present_clients_than_rows(tmp_path):
    data = {"source": "npz", "path": save_set(tmp_path / "a.npz", rows=60)}
    stream = {"kind": "split", "tasks": 2, "presence": 0.5}
    build(data=data, stream=stream, clients={"count": 60})
    refused(
        "clients.count: must be so many that 30 or fewer see a task, its training rows; "
        "by stream.presence 40 do, got 80",
        data=data,
        stream=stream,
        clients={"count": 80},
    )


def test_a_moved_stream_still_shares_its_rows():
    stream = build(stream=ALL[0])
    moved = stream.to("meta")
    assert moved.tasks[0].train.x is moved.tasks[2].train.x
    assert moved.tasks[0].train.x.device.type == "meta"
    assert stream.to("cpu").tasks[1].train.x is stream.tasks[0].train.x


@pytest.mark.parametrize("kind", ["permuted", "split", "pool"])
def test_many_clients_cost_small_arrays(kind, tmp_path):
    path = save_set(tmp_path / "a.npz", rows=8000, shape=(2, 2))
    values = {"data": {"source": "npz", "path": path}, "stream": {"kind": kind, "tasks": 2}}
    partition = {"kind": "dirichlet", "alpha": 0.1}
    stream = build(**values, clients={"count": 3000, "partition": partition})
    for task in stream.tasks:
        assert task.partition.sizes.shape == (3000,)
        assert len(task.partition.index(2999)) == task.partition.sizes[2999]
        assert task.partition.sizes.min() >= (0 if kind == "pool" else 1)
