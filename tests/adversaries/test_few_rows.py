"""A curious server reads examples from what a method uploads beside the update.

Tried on the replies of a node with one row, and on the secure sums of four nodes of which one has
one row of a class:

    directions   the principal direction of one row is the row (FedProTIP's bases, FOT's sketches)
    class sums   the mean of one row is the row (FedNCM, FedLDA, FedRidge, calibrate, the router)
    prototypes   the same, broadcast to all clients (PIP)
    lies         the server asks a node with few rows for an upload all the same

Each attack succeeds where a node's owner allows groups of one row. By default nodes send nothing
about fewer than eight.
"""

from __future__ import annotations

import numpy as np
import pytest
from few_rows import DEFAULT, NODES, OPEN, cosines, digits, federate, network_inputs

from perdure.core.errors import RunError
from perdure.federation.messages import pack
from perdure.methods.parts.prompting import class_moments
from perdure.methods.pip import Pip

CASES = pytest.mark.parametrize(
    ("policy", "is_open"), [(OPEN, True), (DEFAULT, False)], ids=["one row", "default"]
)
RARE = 9
"""The class of which the victim alone has rows."""


def one_row():
    """The victim has one row, the others thirty."""
    return {0: digits(0, 1), **{node: digits(100 * node, 30) for node in range(1, NODES)}}


def one_rare_row(rare=1):
    """All have three classes; the victim has few rows of a fourth one, too."""
    rows = {node: digits(100 * node, 60, (0, 1, 2)) for node in range(NODES)}
    return {**rows, 0: [*rows[0], *digits(0, rare, (RARE,))]}


# ---- directions


def first_direction(matrix):
    return np.linalg.svd(matrix)[0][:, 0]


DIRECTIONS = {
    "pooled": ({"kind": "fedprotip"}, "directions", "fc1.weight/scaled"),
    "union": ({"kind": "fedprotip", "bases": "union"}, "bases", "fc1.weight"),
    "moments": ({"kind": "fedprotip", "transport": "sketch"}, "directions", "fc1.weight/moment"),
    "fot": ({"kind": "fot"}, "sketch", "fc1.weight"),
}


@CASES
@pytest.mark.parametrize(("method", "field", "name"), DIRECTIONS.values(), ids=DIRECTIONS)
def test_the_direction_of_one_row_is_the_row(
    method, field, name, policy, is_open, tmp_path, monkeypatch
):
    rows = one_row()
    seen = federate(tmp_path, monkeypatch, rows, policy, method=method)
    sent = seen.upload(field)
    if is_open:
        assert cosines(first_direction(sent[name]), network_inputs(rows[0])).max() > 0.9999
    else:
        assert not sent
        assert not seen.upload("update")


def test_eight_rows_are_not_directions_but_lie_in_their_span(tmp_path, monkeypatch):
    """Not protected: with an image in hand, a server can test whether it was among eight rows."""
    rows = {**one_row(), 0: digits(0, 8)}
    seen = federate(tmp_path, monkeypatch, rows, DEFAULT, method={"kind": "fedprotip"})
    directions = seen.upload("directions")["fc1.weight/scaled"]
    basis, others = np.linalg.qr(directions)[0], network_inputs(digits(900, 50))
    assert cosines(directions.T, network_inputs(rows[0])).max() < 0.95
    inside = np.linalg.norm(network_inputs(rows[0]) @ basis, axis=1)
    inside /= np.linalg.norm(network_inputs(rows[0]), axis=1)
    outside = np.linalg.norm(others @ basis, axis=1) / np.linalg.norm(others, axis=1)
    assert inside.min() > 0.97 > outside.max()


# ---- class sums, in secure sums of four clients

SECURE = {"privacy": {"secagg": True}}
RAW = ("fedncm", "fedlda", "fedridge")


@CASES
@pytest.mark.parametrize("kind", RAW)
def test_the_mean_of_one_row_is_the_row(kind, policy, is_open, tmp_path, monkeypatch):
    rows, method = one_rare_row(), {"kind": kind, "inputs": "raw"}
    sums = federate(tmp_path, monkeypatch, rows, policy, method=method, **SECURE).sums["sums"]
    row = network_inputs(rows[0][-1:])[0]
    if is_open:
        assert sums["count"][RARE] == 1
        np.testing.assert_allclose(sums["total"][RARE], row, atol=1e-6)
    else:
        assert sums["count"][RARE] == 0
        assert not sums["total"][RARE].any()
        assert not subtracted_gram(sums, rows).any()
    assert sums["count"].sum() == 60 * NODES + is_open


def subtracted_gram(sums, rows):
    """Return the Gram matrix minus that of the classes which all nodes have, if there is one."""
    if "gram" not in sums:
        return np.zeros(1)
    known = np.concatenate([network_inputs(rows[node][:60]) for node in rows])
    return (sums["gram"] - known.T @ known).round(3)


FEATURES = {
    "calibrate": ({"kind": "fedavg", "with": [{"kind": "calibrate", "head": "quadratic"}]},
                  "calibrate.features"),
    "router": ({"kind": "fedprotip", "router": "gaussian", "transport": "sketch"}, "gaussians"),
}  # fmt: skip


@CASES
@pytest.mark.parametrize(("method", "field"), FEATURES.values(), ids=FEATURES)
def test_the_covariance_of_one_row_has_its_features(
    method, field, policy, is_open, tmp_path, monkeypatch
):
    seen = federate(tmp_path, monkeypatch, one_rare_row(), policy, method=method, **SECURE)
    sums = seen.sums[field]
    feature, gram = sums["total"][RARE], sums["gram"][RARE]
    assert sums["count"][RARE] == is_open
    assert bool(feature.any()) == bool(gram.any()) == is_open
    np.testing.assert_allclose(gram, np.outer(feature, feature), atol=1e-5)


@CASES
def test_moments_of_all_rows_minus_those_of_large_classes(policy, is_open, tmp_path, monkeypatch):
    """FedProTIP sends both: what is left of their difference would be the row of the small one."""
    rows, (method, _) = one_rare_row(), FEATURES["router"]
    seen = federate(tmp_path, monkeypatch, rows, policy, method=method, **SECURE)
    energy = seen.sums["directions"]["fc1.weight/energies"][0]
    known = sum(np.square(network_inputs(chosen[:60])).sum() for chosen in rows.values())
    left = np.square(network_inputs(rows[0][-1:])).sum() if is_open else 0.0
    assert energy - known == pytest.approx(left, abs=0.01)


@pytest.mark.parametrize("kind", RAW)
def test_eight_rows_of_one_client_show_their_mean(kind, tmp_path, monkeypatch):
    """Not protected: a secure sum of a class that one client has is that client's."""
    rows, method = one_rare_row(8), {"kind": kind, "inputs": "raw"}
    sums = federate(tmp_path, monkeypatch, rows, DEFAULT, method=method, **SECURE).sums["sums"]
    images = network_inputs(rows[0][-8:])
    mean = sums["total"][RARE] / sums["count"][RARE]
    np.testing.assert_allclose(mean, images.mean(0), atol=1e-6)
    assert cosines(mean, images).max() < 0.99


# ---- PIP's prototypes

VIT = {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4}
PROMPTS = {"rounds": 2, "optimizer": "adam", "lr": 0.02, "batch_size": 32, "max_steps": 2}


@CASES
def test_the_prototype_of_one_row_is_its_feature(policy, is_open, tmp_path, monkeypatch):
    wanted, upload = [], Pip.upload

    def remember(self, client, local):
        if client.id == 0 and not wanted:
            trained = {
                **client.params,
                **{n: client.params[n] + d for n, d in local.update.items()},
            }
            wanted.append(class_moments(client, trained).mean[RARE].double().numpy())
        return upload(self, client, local)

    monkeypatch.setattr(Pip, "upload", remember)
    sections = {"method": {"kind": "pip", "pool": 2, "length": 2}, "model": VIT, "train": PROMPTS}
    seen = federate(tmp_path, monkeypatch, one_rare_row(), policy, **sections, **SECURE)
    sums = seen.sums["prototypes"]
    assert (sums["there"][RARE] > 0) == is_open
    if is_open:
        found = sums["mean"][RARE] / sums["there"][RARE]
        assert cosines(found, wanted[0]).max() > 0.9999
    else:
        assert not sums["mean"][RARE].any()
        assert not sums["square"][RARE].any()


# ---- a server that asks all the same


@pytest.mark.parametrize("method", ["fedavg", "fot", "fedprotip", "fedncm"])
def test_a_node_with_few_rows_sends_nothing_even_if_asked(method, tmp_path, monkeypatch, caplog):
    from few_rows import Seen

    keep = Seen.keep

    def lie(self, node, request, reply):
        reply = keep(self, node, request, reply)
        return pack({"size": 30}) if node == 0 and request.kind == "announce" else reply

    monkeypatch.setattr(Seen, "keep", lie)
    seen = federate(tmp_path, monkeypatch, one_row(), DEFAULT, method={"kind": method})
    asked = [reply for kind, reply in seen.replies if kind in ("train", "exchange")]
    assert asked
    assert all(reply["uploads"] == {"0": {}} for reply in asked)
    assert not any("losses" in reply for reply in asked)
    assert "nothing is sent about 1 rows: at least 8 are required" in caplog.text


def test_a_config_cannot_lower_what_an_owner_asks_for(tmp_path, monkeypatch):
    seen = federate(tmp_path, monkeypatch, one_row(), DEFAULT, privacy={"min_rows": 0})
    assert not seen.upload("update")


def test_no_sum_of_two_is_opened_where_a_third_client_has_few_rows(tmp_path, monkeypatch):
    """The client with few rows does not count as one of three that hide each other."""
    rows = {0: digits(0, 1), 1: digits(100, 30), 2: digits(200, 30)}
    with pytest.raises(RunError, match="a secure sum needs at least 3 clients, and 2 have enough"):
        federate(tmp_path, monkeypatch, rows, DEFAULT, **SECURE)


# ---- what does not hold


def test_class_sums_are_one_clients_where_it_alone_has_enough_rows_of_them(tmp_path, monkeypatch):
    """The others have three rows of each class: they send zeros, which count as uploads."""
    three_each = [[row for c in range(10) for row in digits(300 * n, 3, (c,))] for n in (1, 2, 3)]
    rows = {0: digits(0, 60, (0, 1, 2)), **dict(enumerate(three_each, start=1))}
    method = {"kind": "fedncm", "inputs": "raw"}
    seen = federate(tmp_path, monkeypatch, rows, DEFAULT, method=method, **SECURE)
    victim = network_inputs(rows[0])
    found = seen.sums["sums"]["total"].sum(0)
    np.testing.assert_allclose(found, victim.sum(0), atol=1e-3)
