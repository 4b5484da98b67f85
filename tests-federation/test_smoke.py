"""The smoke test of a federation with local data: server and node die in late tasks."""

from __future__ import annotations

import pytest
from own_files import assert_same, config_of, create, end, undisturbed

from conftest import wait_for

TASKS = 4


@pytest.fixture
def federation(tmp_path):
    created = create(tmp_path)
    yield created
    end(created)


def announced(federation, node: int) -> int:
    """Return the last task that was announced to a node, or -1."""
    files = (federation.home / f"node-{node}" / "state").glob("*/task")
    return max((int(path.read_text()) for path in files), default=-1)


def test_a_run_survives_the_death_of_its_server_and_a_node(federation, tmp_path):
    """In the third task the server dies, in the fourth a node, too; make faults kills in each."""
    config = config_of(rounds=1, tasks=TASKS)
    federation.start()
    out = federation.submit(config, "killed")
    for task in (2, 3):
        wait_for(lambda task=task: announced(federation, 0) >= task, f"task {task + 1}")
        assert not (out / "result.json").exists()
        federation.kill_server()
        if task == 3:
            federation.kill_node(1)
            federation.start_node(1)
        federation.start_server()
    assert_same(federation.result(out), undisturbed(config, tmp_path))
