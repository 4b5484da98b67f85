"""Server and nodes with local data die in every task, and the run ends as if they had not.

A death is simulated by new objects for server and nodes over the same folders, at a moment when a
node has served a request and nobody has received its reply.
"""

from __future__ import annotations

import pytest
from in_process import in_process_engine, no_secrets
from own_data import CONFIG as OWN_DATA
from own_data import with_federation, write_nodes

from perdure.federation.messages import NodeRequest, RoundPosition, pack
from perdure.runs.run import run

pytestmark = pytest.mark.slow

CONFIG = with_federation(OWN_DATA, wait=0)
POSITIONS = [
    (task, kind, round_index)
    for task in range(4)
    for kind, round_index in (("announce", 0), ("train", 0), ("train", 1), ("evaluate", 0))
]
METHODS = {
    "fedavg": {"kind": "fedavg"},
    "a method whose clients have a state": {"kind": "er"},
    "an exchange at the start of the next task": {"kind": "fot", "closing": False},
}
LAST = "an exchange at the start of the next task"


class Killed(Exception):
    pass


@pytest.fixture
def data(tmp_path):
    return write_nodes(tmp_path / "data")


def engine_of(config, folder, data, spoil=None):
    engine, transport = in_process_engine(config, folder, data)
    transport.make_secret_source = no_secrets
    if spoil is not None:
        transport.spoil = spoil
    return engine, transport


def kill_once(positions):
    """Return a function that kills once at each position, when the second node has served."""
    left = set(positions)

    def spoil(node, request, reply):
        position = request.position.task, request.kind, request.position.round
        if node == 1 and position in left:
            left.remove(position)
            raise Killed
        return reply

    return spoil, left


def same(values):
    """Return the part of a result that must not depend on deaths."""
    keys = ("model_sha256", "matrix", "failures", "client_updates", "rounds", "participation")
    return {key: values[key] for key in keys}


@pytest.mark.parametrize(("method", "checkpoint_every"), [*((m, 1) for m in METHODS), (LAST, 2)])
def test_deaths_in_every_task_change_nothing(checkpoint_every, method, tmp_path, data):
    config = {**CONFIG, "method": METHODS[method]}
    config["runs"] = {"report": False, "checkpoint_every": checkpoint_every}
    wanted = run(config, engine=engine_of(config, tmp_path / "alone", data)[0]).values
    spoil, left = kill_once(POSITIONS)
    out, deaths, values = tmp_path / "run", 0, None
    while values is None:
        engine, _ = engine_of(config, tmp_path / "killed", data, spoil)
        try:
            values = run(config, out=out, resume=out.exists(), engine=engine).values
        except Killed:
            deaths += 1
    assert not left
    assert deaths == len(POSITIONS)
    assert same(values) == same(wanted)


def test_a_resumed_server_announces_its_task_alone(tmp_path, data):
    spoil, _ = kill_once([(3, "train", 1)])
    engine, _ = engine_of(CONFIG, tmp_path, data, spoil)
    with pytest.raises(Killed):
        run(CONFIG, out=tmp_path / "run", engine=engine)
    engine, transport = engine_of(CONFIG, tmp_path, data)
    run(CONFIG, out=tmp_path / "run", resume=True, engine=engine)
    announced = [(node, task) for node, kind, task in transport.log if kind == "announce"]
    assert announced == [(0, 3), (1, 3), (2, 3)]


def test_a_node_serves_the_task_before_for_a_server_that_went_back(tmp_path, data):
    _, transport = engine_of(CONFIG, tmp_path, data)
    for task in (0, 1, 2, 1, 1, 2):
        transport.node(0).serve(NodeRequest("announce", RoundPosition(task)), pack({}))
    _, restarted = engine_of(CONFIG, tmp_path, data)
    restarted.node(0).serve(NodeRequest("announce", RoundPosition(3)), pack({}))
