"""A server that does not follow the protocol learns from how, and how often, a node replies.

refusals     a model that lets the node's work fail, to read labels or files in the sentence
"""

from __future__ import annotations

import numpy as np
import pytest
from in_process import InProcessTransport
from test_lying_server import CONFIG, DATA, LOCAL, recorded

from perdure.config import parse
from perdure.flower.protocol import BadMessage, NodeRequest, RoundPosition, pack, unpack
from perdure.training.open_settings import with_method_defaults

# ---- what refusals say


def test_a_refusal_says_nothing_about_labels(tmp_path, caplog):
    """Without the outputs of classes 3 to 9, an error of torch names a label of the node."""
    transport = recorded(tmp_path)
    header, body, _ = transport.requests("train")[0]
    tree = unpack(body)
    for name in ("head.weight", "head.bias"):
        tree["params"][name] = tree["params"][name][:3]
    with pytest.raises(BadMessage) as refusal:
        transport.node(0).serve(header, pack(tree))
    assert str(refusal.value) == "the request cannot be served; the node's log says why"
    assert "is out of bounds" in caplog.text


def test_a_refusal_names_no_file_of_the_data(tmp_path, caplog):
    """A file became unreadable after its task was announced."""
    x, y = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 10
    np.savez(tmp_path / "jane-doe.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (tmp_path / "tasks.yaml").write_text("- {source: npz, path: jane-doe.npz}\n")
    config = with_method_defaults(parse({**CONFIG, **DATA, **LOCAL}))
    transport = InProcessTransport(config, tmp_path, {0: tmp_path})
    announced = NodeRequest("announce", RoundPosition(0), (0,))
    transport.node(0).serve(announced, pack({}))
    (tmp_path / "jane-doe.npz").write_bytes(b"damaged")
    score = NodeRequest("score", RoundPosition(0), (0,), (0,))
    for request in (announced, score):
        transport.nodes.clear()
        with pytest.raises(BadMessage) as refusal:
            transport.node(0).serve(request, pack({"params": {}, "buffers": {}, "state": {}}))
        assert str(refusal.value) == "its data of task 1 cannot be used; the node's log says why"
    assert "jane-doe.npz" in caplog.text
