"""Federations whose nodes read files, and the result of the same run without processes."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import Federation, flower_processes, wait_for
from perdure.runs.run import run

sys.path.append(str(Path(__file__).parent.parent / "tests" / "federation"))
import own_data
from in_process import in_process_engine


def config_of(rounds: int, tasks: int, **federation) -> dict:
    """Return a config with so many rounds and tasks, and keys of its federation section."""
    config = own_data.with_federation(own_data.CONFIG, tasks=own_data.TASKS[:tasks], **federation)
    return {
        **config,
        "stream": {**config["stream"], "tasks": tasks},
        "train": {**config["train"], "rounds": rounds},
        "runs": {},
    }


def create(tmp_path: Path) -> Federation:
    """Return a federation that is not started, with files for its nodes."""
    own_data.write_nodes(tmp_path / "data")
    return Federation(tmp_path / "home", tmp_path / "data")


def end(federation: Federation) -> None:
    """Stop a federation and wait for the end of its processes."""
    federation.stop()
    wait_for(lambda: flower_processes(federation.home) == [], "the end of all processes")


def undisturbed(config: dict, tmp_path: Path) -> dict:
    """Return the result of a run over nodes in this process."""
    data = {node: tmp_path / "data" / f"node-{node}" for node in range(3)}
    engine, _ = in_process_engine(config, tmp_path / "undisturbed", data)
    return run(config, engine=engine).values


def assert_same(values: dict, wanted: dict) -> None:
    """Compare what must not depend on deaths and cut lines."""
    for key in ("model_sha256", "matrix", "client_updates", "rounds", "participation", "failures"):
        assert values[key] == wanted[key], key
