"""Nobody knows the future: a task does not depend on how many tasks follow it."""

import itertools

import numpy as np
import pytest
import torch

from perdure.config import parse
from perdure.core.rng import Rng
from perdure.data.streams import make_stream

CLIENTS = 6
SHORT, LONG = 3, 5
STREAMS = [
    {"kind": "permuted"},
    {"kind": "split", "classes_per_task": 2},
    {"kind": "split", "classes_per_task": 3, "overlap": 2},
    {"kind": "pool", "classes_per_task": 2},
    {"kind": "domains"},
    {"kind": "domains", "order": [4, 1, 3, 0, 2]},
    {"kind": "domains", "labels": "separate"},
]
PARTITIONS = [
    {"kind": "iid"},
    {"kind": "dirichlet", "alpha": 0.3},
    {"kind": "shards"},
    {"kind": "classes"},
    {"kind": "classes", "disjoint": True},
]


def save_domain(path, seed):
    """Images as bright as their domain's number says, so that all have different moments."""
    rng = np.random.default_rng(seed)
    top = 40 * (seed + 1)
    np.savez(
        path,
        x_train=rng.integers(0, top, (90 + seed, 4, 4), dtype=np.uint8),
        y_train=rng.permutation(np.arange(90 + seed) % 5),
        x_test=rng.integers(0, top, (30, 4, 4), dtype=np.uint8),
        y_test=rng.permutation(np.arange(30) % 5),
    )
    return {"source": "npz", "path": str(path)}


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("domains")
    return [save_domain(folder / f"{number}.npz", number) for number in range(LONG)]


def build(stream, tasks, listed, partition=None, presence=1.0, **data):
    stream = stream | {"tasks": tasks, "presence": presence}
    if stream["kind"] == "domains":
        stream["domains"] = listed
    clients = {"count": CLIENTS, "partition": partition or PARTITIONS[0]}
    return make_stream(parse({"stream": stream, "clients": clients, "data": data}), Rng(3))


def content(task):
    """All that a task consists of, by name."""
    some = torch.arange(0, len(task.train), 7)
    shares, labels, clients = task.partition, task.train.y, range(CLIENTS)
    return {
        "index": task.index,
        "name": task.name,
        "classes": task.classes,
        "rows": [shares.index(client) for client in clients],
        "sizes": torch.as_tensor(shares.sizes),
        "counts": torch.as_tensor(shares.counts(labels.numpy(), int(labels.max()) + 1)),
        "classes of clients": [task.classes_of(client) for client in clients],
        "train": task.train.gather(some),
        "train labels": labels,
        "test": task.test.gather(torch.arange(len(task.test))),
        "test labels": task.test.y,
        "groups": [group.index for group in task.groups],
        "classes of groups": [(group.classes, group.weight) for group in task.groups],
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def differing(a, b):
    """The names of what is not the same in two tasks."""
    one, two = content(a), content(b)
    return [name for name in one if not equal(one[name], two[name])]


@pytest.mark.parametrize("presence", [1.0, 0.5])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_a_shorter_stream_is_the_beginning_of_a_longer_one(stream, partition, presence, listed):
    short, long = (build(stream, n, listed, partition, presence) for n in (SHORT, LONG))
    assert (len(short.tasks), len(long.tasks)) == (SHORT, LONG)
    assert short.shape == long.shape
    assert short.class_names == long.class_names[: short.classes]
    for a, b in zip(short.tasks, long.tasks, strict=False):
        assert differing(a, b) == []
    for a, b in itertools.pairwise(long.tasks):  # the comparison can tell tasks apart
        assert {"index", "name"} < set(differing(a, b))


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_one_task_is_the_beginning_too(stream, listed):
    (only,) = build(stream, 1, listed, presence=0.5).tasks
    assert differing(only, build(stream, LONG, listed, presence=0.5).tasks[0]) == []


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_half_of_the_clients_see_a_task_and_not_always_the_same(stream, listed):
    tasks = build(stream, LONG, listed, presence=0.5).tasks
    seen = [tuple(np.flatnonzero(task.partition.sizes).tolist()) for task in tasks]
    assert [len(there) for there in seen] == [CLIENTS // 2] * LONG
    assert len(set(seen)) > 1


def test_domains_that_a_shorter_list_lacks_change_nothing(listed):
    short, long = (build({"kind": "domains"}, SHORT, part) for part in (listed[:SHORT], listed))
    for a, b in zip(short.tasks, long.tasks, strict=True):
        assert differing(a, b) == []


def test_a_limit_draws_the_same_rows(listed):
    for stream in STREAMS[:4]:
        short, long = (build(stream, n, listed, limit=200, test_limit=90) for n in (SHORT, LONG))
        for a, b in zip(short.tasks, long.tasks, strict=False):
            assert differing(a, b) == []


@pytest.mark.parametrize("given", [{}, {"size": 4, "channels": 1}], ids=["found", "given"])
def test_domains_of_different_shapes_need_a_given_one(given, listed, tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (30, 6, 6, 3), dtype=np.uint8), np.arange(30) % 5
    path = tmp_path / "larger.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    more = [*listed[:2], {"source": "npz", "path": str(path)}]
    short, long = (build({"kind": "domains"}, n, more, **given) for n in (2, 3))
    same = [differing(a, b) == [] for a, b in zip(short.tasks, long.tasks, strict=False)]
    assert same == [bool(given)] * 2
