"""The smoke test of nodes whose owners require secure aggregation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from own_files import config_of, create, end

from conftest import perdure, wait_for


@pytest.fixture
def federation(tmp_path):
    created = create(tmp_path)
    created.set_policy(require_secagg=True, min_clients=3, methods=["fedavg"])
    yield created
    end(created)


def test_owners_get_the_protection_that_they_require(federation):
    federation.start()
    plain = config_of(rounds=1, tasks=1, wait=0)
    federation.submit(plain, "plain")
    refusal = "policy.require_secagg of this node: privacy.secagg must be true"
    wait_for(lambda: refusal in federation.server_log(), "the refusal", federation.server)
    values = federation.run({**plain, "privacy": {"secagg": True}}, "secure")
    assert values["failures"] == []
    assert values["client_updates"] == 3
    for number in range(3):
        node = str(federation.home / f"node-{number}")
        rows = json.loads(perdure("federation", "node", node, "--json"))
        (trained,) = [row for row in rows if row["kind"] == "train"]
        assert trained["protection"] == "masked"
        assert trained["replies"] == 1
        wait_for(
            lambda node=node: stored(node) == [".lock", "config.sha256", "ended"], "the clean-up"
        )


def stored(node: str) -> list[str]:
    """Return what a node still stores of its runs."""
    return sorted(path.name for path in Path(node, "state").glob("*/*"))
