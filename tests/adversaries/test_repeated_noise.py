"""A reader of the models averages the noise that a server draws again after a restart.

Nodes are readers: they receive the model in every round and in tests. The server dies when it has
sent the model of two noisy rounds, and repeats both from the start, with new noise.
"""

from __future__ import annotations

import dp_accounting as dp
import pytest
from dp_accounting.rdp import RdpAccountant
from few_rows import CONFIG, digits, write
from in_process import in_process_engine

from perdure.federation.messages import unpack
from perdure.runs.run import run

NOISE, ROUNDS = 2.0, 2
NOISY = {
    **CONFIG,
    "train": {**CONFIG["train"], "rounds": ROUNDS},
    "privacy": {"clip": 1.0, "noise": NOISE},
    "runs": {"checkpoint_every": 5, "report": False},
}


class Killed(Exception):
    pass


@pytest.fixture
def data(tmp_path):
    return {n: write(tmp_path / f"data-{n}", digits(100 * n, 30)) for n in range(4)}


def start(folder, data, spoil, resume=False):
    engine, transport = in_process_engine(NOISY, folder, data)
    send = transport.send_and_receive
    seen = []

    def watched(headers, body, limit):
        if b"params" in body:
            seen.append(unpack(body)["params"]["fc1.bias"])
        return send(headers, body, limit)

    transport.send_and_receive, transport.spoil = watched, spoil
    try:
        return run(NOISY, out=folder / "run", resume=resume, engine=engine).values, seen
    except Killed:
        return {}, seen


def die(node, request, reply):
    if request.kind == "evaluate":
        raise Killed
    return reply


def live(node, request, reply):
    return reply


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_every_noisy_model_that_nodes_received_is_accounted(deaths, tmp_path, data):
    models = []
    for number in range(deaths):
        models += start(tmp_path, data, die, resume=number > 0)[1]
    values, seen = start(tmp_path, data, live, resume=deaths > 0)
    distinct = {tuple(model.tolist()) for model in [*models, *seen]}
    noisy_sums = len(distinct) - 1  # the first model has no noise
    assert noisy_sums == ROUNDS * (deaths + 1)
    accountant = RdpAccountant()
    accountant.compose(dp.GaussianDpEvent(NOISE), noisy_sums)
    found = values["privacy"]
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(found["delta"]), rel=1e-12)
