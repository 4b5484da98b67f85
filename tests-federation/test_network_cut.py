"""The line between a node and the server is cut for a while; nothing of the run is lost."""

from __future__ import annotations

import os
import time

import pytest
from own_files import assert_same, config_of, create, end, undisturbed
from paused_proxy import PausedProxy

from conftest import wait_for
from perdure.federation.admin.folders import NodeFolder

SECONDS = float(os.environ.get("PERDURE_CUT_SECONDS", "20"))
"""How long the line is cut."""


@pytest.fixture
def federation(tmp_path):
    created = create(tmp_path)
    created.proxy = PausedProxy(created.port)
    NodeFolder(created.home / "node-2", 2, f"localhost:{created.proxy.port}").write()
    yield created
    created.proxy.close()
    end(created)


def test_a_cut_line_loses_nothing(federation, tmp_path):
    config = config_of(rounds=3, tasks=2, quorum=3)
    config["engine"] = {"kind": "flower", "timeout": 60}
    federation.start()
    out = federation.submit(config, "cut")
    wait_for((out / "events.jsonl").is_file, "the first round", federation.server)
    federation.proxy.cut()
    before = federation.proxy.connections
    time.sleep(SECONDS)
    assert not (out / "result.json").exists()
    federation.proxy.repair()
    values = federation.result(out)
    assert federation.proxy.connections > before
    assert_same(values, undisturbed(config, tmp_path))
