"""A server repeats its orders, so that the mean of many noisy replies tells what one does not.

    back and forth   an order, another one at the same place, and the first again
    over and over    orders of many places, which fill the disk of the node

The node and the accountant count all of them.
"""

from __future__ import annotations

import dp_accounting as dp
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from test_lying_server import NOISY, Recorder, recorded

from perdure.federation.messages import pack, read_upload, unpack
from perdure.federation.server.engine import FlowerEngine
from perdure.runs.run import run

KEPT = 12
"""Places whose replies a node keeps: two checkpoints of one round, two more, and 8 exchanges."""
LONG = {**NOISY, "train": {"rounds": KEPT + 2, "max_steps": 1}}


def other(body, number=1):
    """Return an order with another model."""
    tree = unpack(body)
    tree["params"]["fc1.bias"] = tree["params"]["fc1.bias"] + 1e-6 * number
    return pack(tree)


def bias(reply):
    return read_upload(unpack(reply)["uploads"]["0"])["update"].value["fc1.bias"]


def privacy_of(config, transport):
    return run(config, engine=FlowerEngine(4, transport)).values["privacy"]


def test_back_and_forth_is_counted(tmp_path):
    """Two lives of the server died in round 1; the third asks as the first one did."""
    first = recorded(tmp_path / "first", **NOISY)
    header, body, _ = first.requests("train")[0]
    second = Recorder(first.config, tmp_path / "second")
    sent = bias(second.node(0).serve(header, body))
    second.node(0).serve(header, other(body))
    assert torch.equal(bias(second.node(0).serve(header, body)), sent)
    found = privacy_of(first.config, second)
    accountant = RdpAccountant()  # two replies of round 1, one of round 2; local noise counts half
    accountant.compose(dp.GaussianDpEvent(NOISY["privacy"]["noise"] / 2), 3)
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(found["delta"]), rel=1e-12)


def test_a_node_stores_the_replies_of_a_few_places(tmp_path):
    transport = recorded(tmp_path, **LONG)
    folder = transport.node(0).run.folder / "sent"
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert sorted(size > 0 for size in sizes) == [False, False] + [True] * KEPT
