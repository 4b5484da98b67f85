import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.data.partition import make_partition
from perdure.data.partition_kinds import fill_empty, random_assignment


def setting(rows=600, classes=10, seed=0):
    """Row numbers with gaps, so that a row's number and its place cannot be confused."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, classes, rows), np.sort(rng.choice(5 * rows, rows, replace=False))


def divide(labels, rows, clients, seed=0, present=None, **config):
    rng = np.random.default_rng(seed)
    return make_partition(
        labels,
        rows,
        clients,
        parse({"clients": {"partition": config}}).clients.partition,
        rng,
        present,
    )


def indices(shares):
    return [shares.index(client).numpy() for client in range(len(shares.sizes))]


def label_counts(shares, labels, rows):
    """Rows of each class at each client, counted one by one."""
    label_of = dict(zip(rows.tolist(), labels.tolist(), strict=True))
    table = np.zeros((len(shares.sizes), labels.max() + 1), int)
    for client, index in enumerate(indices(shares)):
        for row in index.tolist():
            table[client, label_of[row]] += 1
    return table


def check_every_row_once(shares, rows):
    parts = indices(shares)
    assert [len(part) for part in parts] == shares.sizes.tolist()
    assert np.array_equal(np.sort(np.concatenate(parts)), rows)


EXCLUSIVE = [
    {"kind": "iid"},
    {"kind": "dirichlet", "alpha": 0.5},
    {"kind": "shards"},
    {"kind": "classes", "disjoint": True},
]


@pytest.mark.parametrize("config", EXCLUSIVE, ids=lambda c: c["kind"])
def test_every_row_is_held_by_one_client_and_every_client_has_a_row(config):
    labels, rows = setting()
    shares = divide(labels, rows, 25, **config)
    check_every_row_once(shares, rows)
    assert shares.sizes.min() >= 1


@pytest.mark.parametrize("config", [*EXCLUSIVE, {"kind": "classes"}], ids=str)
def test_only_present_clients_hold_rows(config):
    labels, rows = setting()
    present = np.arange(25) % 3 == 1
    shares = divide(labels, rows, 25, present=present, **config)
    assert np.array_equal(shares.sizes > 0, present)
    assert len(shares.index(0)) == 0
    assert set(np.concatenate(indices(shares)).tolist()) == set(rows.tolist())


@pytest.mark.parametrize("config", [*EXCLUSIVE, {"kind": "classes"}], ids=str)
def test_the_draw_depends_on_the_generator_alone(config):
    labels, rows = setting()
    a, b, c = (indices(divide(labels, rows, 9, seed=s, **config)) for s in (1, 1, 2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


@pytest.mark.parametrize("config", [*EXCLUSIVE, {"kind": "classes"}], ids=str)
def test_counts_are_those_of_the_indices(config):
    labels, rows = setting()
    shares = divide(labels, rows, 12, **config)
    by_row = np.zeros(rows.max() + 1, int)
    by_row[rows] = labels
    assert np.array_equal(shares.counts(by_row, 10), label_counts(shares, labels, rows))


def test_iid_is_even_and_mixed():
    labels, rows = setting()
    shares = divide(labels, rows, 7, kind="iid")
    assert shares.sizes.max() - shares.sizes.min() <= 1
    assert (label_counts(shares, labels, rows) > 0).all()


@given(
    alpha=st.floats(1e-3, 1e3),
    clients=st.integers(1, 1000),
    extra=st.integers(0, 500),
    classes=st.integers(1, 30),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_dirichlet_leaves_no_client_empty(alpha, clients, extra, classes, seed):
    labels, rows = setting(clients + extra, classes, seed)
    shares = divide(labels, rows, clients, seed, kind="dirichlet", alpha=alpha)
    check_every_row_once(shares, rows)
    assert shares.sizes.min() >= 1


@pytest.mark.parametrize("alpha", [1e-300, 1e-12, 1e-3, 1e3, 1e300])
def test_dirichlet_handles_extreme_alpha(alpha):
    labels, rows = setting(3000)
    shares = divide(labels, rows, 1000, kind="dirichlet", alpha=alpha)
    check_every_row_once(shares, rows)
    assert shares.sizes.min() >= 1


def test_dirichlet_follows_alpha():
    labels, rows = setting(20_000)
    even = label_counts(divide(labels, rows, 10, kind="dirichlet", alpha=1e6), labels, rows)
    assert np.allclose(even / even.sum(0), 0.1, atol=0.01)
    sharp = label_counts(divide(labels, rows, 10, kind="dirichlet", alpha=1e-3), labels, rows)
    assert (sharp.max(0) / sharp.sum(0)).mean() > 0.95


def test_dirichlet_proportions_have_their_moments():
    """Of a Dirichlet share: mean 1/K, variance (1/K)(1 - 1/K) / (K alpha + 1)."""
    labels = np.repeat(np.arange(200), 400)
    shares = divide(labels, np.arange(len(labels)), 5, kind="dirichlet", alpha=0.7)
    proportions = shares.counts(labels, 200).T / 400
    assert abs(proportions.mean() - 0.2) < 1e-9
    wanted = 0.2 * 0.8 / (5 * 0.7 + 1)
    assert abs(proportions.var() / wanted - 1) < 0.15


def test_fill_empty_takes_from_the_richest():
    table = np.array([[5, 0, 1, 0], [3, 0, 1, 0]])
    fill_empty(table)
    assert table.tolist() == [[3, 1, 1, 1], [3, 0, 1, 0]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(1, 5))
@settings(deadline=None)
def test_fill_empty_keeps_every_class(sizes, classes):
    table = np.array([[size // (k + 1) for size in sizes] for k in range(classes)])
    if table.sum() < len(sizes):
        table[0, 0] += len(sizes)
    before = table.sum(1)
    fill_empty(table)
    assert (table.sum(0) >= 1).all()
    assert (table >= 0).all()
    assert np.array_equal(table.sum(1), before)


def test_shards_have_few_labels_each():
    labels = np.repeat(np.arange(10), 60)
    shares = divide(labels, np.arange(600), 10, kind="shards", per_client=2)
    assert shares.sizes.tolist() == [60] * 10
    # 20 shards of 30 rows: each lies within one label
    assert (label_counts(shares, labels, np.arange(600)) > 0).sum(1).max() <= 2
    whole = divide(labels, np.arange(600), 10, kind="shards", per_client=1)
    assert (label_counts(whole, labels, np.arange(600)) > 0).sum(1).tolist() == [1] * 10


def test_classes_give_each_client_all_rows_of_a_fraction_of_the_classes():
    labels, rows = setting()
    shares = divide(labels, rows, 8, kind="classes", fraction=0.6)
    table = label_counts(shares, labels, rows)
    assert ((table > 0).sum(1) == 6).all()
    totals = np.bincount(labels)
    assert ((table == 0) | (table == totals)).all()
    assert (table.max(0) == totals).all()


@pytest.mark.parametrize(
    ("classes", "fraction", "held"),
    [(2, 0.6, 2), (2, 0.5, 1), (3, 0.6, 2), (4, 0.6, 3), (5, 0.6, 3), (10, 0.6, 6), (20, 0.6, 12),
     (10, 0.7, 7), (10, 0.3, 3), (10, 0.01, 1), (2, 1.0, 2)],
)  # fmt: skip
@pytest.mark.parametrize("disjoint", [False, True])
def test_a_fraction_of_the_classes_is_rounded_up(classes, fraction, held, disjoint):
    """The paper of PIP and GLFC have 6 of 10; 60% of 2 is not 1, which is 50%."""
    labels = np.repeat(np.arange(classes), 40)
    rows = np.arange(len(labels))
    shares = divide(labels, rows, 12, kind="classes", fraction=fraction, disjoint=disjoint)
    assert (label_counts(shares, labels, rows) > 0).sum(1).tolist() == [held] * 12


def test_clients_with_a_common_class_divide_its_rows():
    labels, rows = setting(2000)
    shares = divide(labels, rows, 8, kind="classes", fraction=0.6, disjoint=True)
    table = label_counts(shares, labels, rows)
    assert ((table > 0).sum(1) == 6).all()
    for column in table.T:
        held = column[column > 0]
        assert held.max() - held.min() <= 1


def test_few_clients_cannot_hold_all_classes():
    labels = np.repeat(np.arange(10), 5)
    shares = divide(labels, np.arange(50), 2, kind="classes", fraction=0.2, disjoint=True)
    assert shares.sizes.tolist() == [10, 10]  # two classes each, none twice


@given(st.integers(1, 40), st.integers(1, 40), st.data(), st.integers(0, 2**32))
@settings(deadline=None)
def test_random_assignment_covers_as_many_options_as_possible(parts, options, data, seed):
    each = data.draw(st.integers(1, options))
    holds = random_assignment(parts, options, each, np.random.default_rng(seed))
    assert (holds.sum(1) == each).all()
    assert holds.any(0).sum() == options if parts * each >= options else (holds.sum(0) <= 1).all()


def test_random_assignment_is_uniform():
    holds = random_assignment(4000, 10, 3, np.random.default_rng(0))
    assert np.allclose(holds.mean(0), 0.3, atol=0.03)
    pairs = [(holds[:, a] & holds[:, b]).mean() for a, b in itertools.combinations(range(10), 2)]
    assert np.allclose(pairs, 3 / 10 * 2 / 9, atol=0.02)


def test_more_clients_than_rows_are_refused():
    labels, rows = setting(20)
    for config in EXCLUSIVE[:2]:
        with pytest.raises(UserError, match=r"clients\.count: must be at most 20, .*got 21$"):
            divide(labels, rows, 21, **config)
    assert divide(labels, rows, 50, kind="classes").sizes.min() > 0
    sentence = r"^clients\.partition\.per_client: must be at most 2 .*, got 3$"
    with pytest.raises(UserError, match=sentence):
        divide(labels, rows, 10, kind="shards", per_client=3)
    present = np.arange(40) < 20
    assert divide(labels, rows, 40, present=present, kind="iid").sizes.sum() == 20


def test_memory_does_not_grow_with_the_clients():
    labels, rows = setting(20_000)
    few, many = (divide(labels, rows, n, kind="dirichlet") for n in (10, 10_000))
    assert many.rows.nbytes == few.rows.nbytes
    assert many.offsets.nbytes <= 8 * 10_001
    assert many.index(5).data_ptr() == many.rows[int(many.offsets[5]) :].data_ptr()
