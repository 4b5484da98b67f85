"""The smoke test of a federation with local data: server and nodes die in every task."""

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


def test_a_run_survives_the_death_of_its_server_in_every_task(federation, tmp_path):
    """In the second and third task a node dies with the server."""
    config = config_of(rounds=1, tasks=TASKS)
    federation.start()
    out = federation.submit(config, "killed")
    for task in range(TASKS):
        wait_for(lambda task=task: announced(federation, 0) >= task, f"task {task + 1}")
        assert not (out / "result.json").exists()
        federation.kill_server()
        if task in (1, 2):
            federation.kill_node(task)
            federation.start_node(task)
        federation.start_server()
    assert_same(federation.result(out), undisturbed(config, tmp_path))
