"""A curious server inverts updates: the gradient of the first layer is made of its inputs.

Of unit i of a linear first layer the gradient by the weights is sum_n d_in x_n, and by the bias
sum_n d_in, over the rows x_n that activate the unit. Their ratio is a weighted mean of rows; of a
unit that one row alone activates, it is that row. No optimization is needed. The server has the
update of FedAvg, which for one local step is a multiple of the gradient.

Protected: clients with fewer than `min_rows` rows (nothing is sent), and whose row it is (a secure
sum). Not protected: single rows of larger clients in plain updates, and a few rows of some client
even in secure sums. Clipping and noise remove those.
"""

from __future__ import annotations

import zlib
from itertools import chain

import numpy as np
import pytest
from few_rows import DEFAULT, NODES, OPEN, cosines, digits, federate, network_inputs

EXACT = 1e-2
"""Largest error of a pixel that counts as read; pixels have the standard deviation 1."""
STRANGERS = network_inputs(digits(900, 120))
WIDE, NARROW = {"kind": "mlp", "hidden": [256]}, {"kind": "mlp", "hidden": [32]}


def inverted(update):
    """Return the ratio of both gradients per unit, float [units, 64]."""
    weight, bias = update["fc1.weight"], update["fc1.bias"]
    moved = np.abs(bias) > 1e-6
    return weight[moved] / bias[moved, None]


def read(found, rows):
    """Return the number of rows that were found exactly."""
    return int((np.abs(found[:, None] - rows).max(2).min(0) < EXACT).sum())


def nearest(found, rows):
    """Return the largest cosine of any of the rows with anything found, both without the mean."""
    mean = STRANGERS.mean(0)
    return cosines(found - mean, rows - mean).max()


def rows_of_nodes(victim):
    others = {node: digits(100 * node, 30) for node in range(1, NODES)}
    return {0: digits(0, victim), **others}


def attack(tmp_path, monkeypatch, victim, policy=DEFAULT, model=NARROW, epochs=1, privacy=None):
    """Return what was seen, and the rows of the victim and of all nodes."""
    rows, train = rows_of_nodes(victim), {"rounds": 1, "batch_size": 64, "lr": 0.1}
    seen = federate(
        tmp_path, monkeypatch, rows, policy, method={"kind": "fedavg"}, model=model,
        train={**train, "local_epochs": epochs}, privacy=privacy or {},
    )  # fmt: skip
    return seen, network_inputs(rows[0]), network_inputs([*chain(*rows.values())])


@pytest.mark.parametrize(
    ("policy", "is_open"), [(OPEN, True), (DEFAULT, False)], ids=["one row", "default"]
)
def test_one_row_is_read_from_its_update(policy, is_open, tmp_path, monkeypatch):
    seen, row, _ = attack(tmp_path, monkeypatch, 1, policy)
    update = seen.upload("update")
    if is_open:
        assert read(inverted(update), row) == 1
    else:
        assert not update
        assert not [reply for kind, reply in seen.replies if kind == "train"]


@pytest.mark.parametrize(("victim", "epochs", "least"), [(8, 1, 4), (8, 5, 4), (30, 1, 2)])
def test_rows_are_read_from_plain_updates(victim, epochs, least, tmp_path, monkeypatch):
    """Not protected: 7 of 8 rows after one or five steps, 6 of 30 rows after one."""
    seen, rows, _ = attack(tmp_path, monkeypatch, victim, model=WIDE, epochs=epochs)
    found = inverted(seen.upload("update"))
    assert read(found, rows) >= least
    assert read(found, STRANGERS) == 0


def test_a_masked_update_is_random_bytes(tmp_path, monkeypatch):
    seen, _, _ = attack(tmp_path, monkeypatch, 8, privacy={"secagg": True})
    (reply,) = [reply for kind, reply in seen.replies if kind == "train"]
    assert not reply["uploads"]
    masked = reply["masked"]["0"].numpy().tobytes()[2048:]  # behind the names
    assert len(zlib.compress(masked, 9)) > 0.99 * len(masked)
    total = np.rint(seen.sums["update"]["fc1.weight"] * 2.0**30).astype(np.int64).tobytes()
    assert len(zlib.compress(total, 9)) < 0.9 * len(total)  # as the values are without masks


def test_a_few_rows_are_read_from_secure_sums(tmp_path, monkeypatch):
    """Not protected: 2 of 120 rows, since a sum is the update of all rows together."""
    privacy = {"secagg": True}
    seen, _, everybody = attack(tmp_path, monkeypatch, 30, model=WIDE, privacy=privacy)
    found = inverted(seen.sums["update"])
    assert 1 <= read(found, everybody) <= 12
    assert read(found, STRANGERS) == 0


def test_clipping_and_noise_hide_rows_in_sums(tmp_path, monkeypatch):
    privacy = {"secagg": True, "clip": 0.5, "noise": 0.8}
    seen, _, everybody = attack(tmp_path, monkeypatch, 30, model=WIDE, privacy=privacy)
    found = inverted(seen.sums["update"])
    assert read(found, everybody) == 0
    assert nearest(found, everybody) < 0.8  # about 0.5, as for rows that no client has
