"""Runs read back: groups and their names, and what is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from perdure.config import dump_saved, parse
from perdure.core.errors import UserError
from perdure.runs.records import read_run, read_runs

METRICS = {
    "ACC": 0.5,
    "FT": 0.1,
    "FGT": 0.1,
    "AF": 0.1,
    "BWT": -0.1,
    "Avg": 0.6,
    "PD": 0.2,
    "F": 0.1,
}


def make_run(path: Path, config: dict[str, Any] | None = None, **result: Any) -> Path:
    checked = parse(config or {})
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump_saved(checked))
    values = {
        "method": checked.method["kind"],
        "seed": checked.seed,
        "tasks": 2,
        "matrix": {},
        "metrics": {"task_agnostic": METRICS},
        "measure": "accuracy",
        "draws": "those of a seed",
        "bytes": {"up": 10, "down": 20, "by_task": [], "by_field": {}, "types": {}, "kept": None},
        "seconds": {"total": 1.0, "by_task": [0.5, 0.5]},
        **result,
    }
    (path / "result.json").write_text(json.dumps(values))
    (path / "events.jsonl").write_text('{"event": "round"}\n{"event": "ta')
    return path


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "seed-10", {"seed": 10})
    make_run(tmp_path / "a" / "seed-9", {"seed": 9})
    make_run(tmp_path / "b", {"method": {"kind": "fot"}})
    runs = read_runs([tmp_path, tmp_path / "a"])
    assert [record.path.name for record in runs.records] == ["seed-9", "seed-10", "b"]
    assert runs.skipped == ()


def test_a_record_has_the_config_the_result_and_whole_events(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "x", {"seed": 3, "method": {"kind": "special"}}))
    assert (record.kind, record.seed, record.tasks) == ("special", 3, 2)
    assert record.events == [{"event": "round"}]


def test_seeds_of_one_setting_are_one_group(tmp_path: Path) -> None:
    for seed in (1, 0):
        make_run(tmp_path / f"x{seed}", {"seed": seed})
        make_run(tmp_path / f"y{seed}", {"seed": seed, "method": {"kind": "fot"}})
    groups = read_runs([tmp_path]).groups
    assert {name: [r.seed for r in group] for name, group in groups.items()} == {
        "fedavg": [0, 1],
        "fot": [0, 1],
    }


def test_a_default_that_one_seed_spells_out_does_not_part_a_group(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {"method": {"kind": "fedprox"}}, seed=0)
    make_run(tmp_path / "b", {"seed": 1, "method": {"kind": "fedprox", "mu": 0.01}}, seed=1)
    assert [len(group) for group in read_runs([tmp_path]).groups.values()] == [2]


AUTO, VECTOR = {"kind": "auto"}, {"kind": "vector", "chunk": 4}


def test_seeds_that_were_added_on_another_engine_do_not_part_a_group(tmp_path: Path) -> None:
    """Runs with engine auto, and runs that name theirs."""
    for seed, engine in enumerate([AUTO, VECTOR, VECTOR]):
        for share in (0.8, 0.95):
            method = {"kind": "fot", "threshold": share}
            values = {"seed": seed, "method": method, "engine": engine}
            if (seed, share) != (0, 0.8):
                make_run(tmp_path / f"{share}-{seed}", values)
    make_run(tmp_path / "0.8-3", {"seed": 3, "method": {"kind": "fot", "threshold": 0.8}})
    groups = read_runs([tmp_path]).groups
    assert {name: [r.seed for r in group] for name, group in groups.items()} == {
        "fot threshold=0.8": [1, 2, 3],
        "fot threshold=0.95": [0, 1, 2],
    }


def test_engines_that_ran_the_same_seed_are_compared(tmp_path: Path) -> None:
    for kind in ("serial", "vector"):
        for mu in (0.1, 0.2):
            method = {"kind": "fedprox", "mu": mu}
            make_run(tmp_path / f"{kind}-{mu}", {"method": method, "engine": {"kind": kind}})
    assert set(read_runs([tmp_path]).groups) == {
        f"fedprox mu={mu}, engine.kind={kind}" for mu in (0.1, 0.2) for kind in ("serial", "vector")
    }


def test_groups_of_one_kind_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    for share in (0.8, 0.95):  # the second one is the default
        make_run(tmp_path / str(share), {"method": {"kind": "fot", "threshold": share}})
    assert list(read_runs([tmp_path]).groups) == ["fot threshold=0.8", "fot threshold=0.95"]


def test_the_labels_of_a_comparison_are_kept(tmp_path: Path) -> None:
    make_run(tmp_path / "strict" / "seed-0", {"method": {"kind": "fot", "threshold": 0.99}})
    assert list(read_runs([tmp_path]).groups) == ["strict"]
    assert list(read_runs([tmp_path / "strict" / "seed-0"]).groups) == ["strict"]


def test_a_comparison_keeps_the_order_of_its_methods(tmp_path: Path) -> None:
    for kind in ("special", "fedavg", "fot"):
        make_run(tmp_path / kind / "seed-0", {"method": {"kind": kind}})
    assert list(read_runs([tmp_path]).groups) == ["fedavg", "fot", "special"]
    planned = [{"path": "special/seed-0"}, {"path": "fedavg/seed-0"}, {"path": "gone/seed-0"}]
    (tmp_path / "comparison.json").write_text(json.dumps({"runs": planned}))
    assert list(read_runs([tmp_path]).groups) == ["special", "fedavg", "fot"]
    (tmp_path / "comparison.json").write_text("{}")
    assert list(read_runs([tmp_path]).groups) == ["fedavg", "fot", "special"]


def test_a_copy_is_not_a_second_draw(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path / "x")
    make_run(tmp_path / "y")
    with caplog.at_level(logging.WARNING):
        assert [len(group) for group in read_runs([tmp_path]).groups.values()] == [1]
    assert "repeats" in caplog.text


def test_what_cannot_be_used_is_named_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [make_run(tmp_path / f"good{seed}", {"seed": seed}) for seed in (0, 1)]
    make_run(tmp_path / "half", {"seed": 2}).joinpath("result.json").unlink()
    make_run(tmp_path / "long", {"seed": 3}, tasks=9)
    make_run(tmp_path / "torn", {"seed": 4}).joinpath("result.json").write_text("{")
    make_run(tmp_path / "bare", {"seed": 5}).joinpath("result.json").write_text("{}")
    make_run(tmp_path / "odd", {"seed": 6}).joinpath("config.yaml").write_text(
        "format: 1\ncolor: red"
    )
    make_run(tmp_path / "wrong", {"seed": 7}, tasks=None)
    make_run(tmp_path / "hollow", {"seed": 8}, bytes={})
    (tmp_path / "empty").mkdir()
    with caplog.at_level(logging.WARNING):
        runs = read_runs([tmp_path, tmp_path / "empty"])
    assert [record.path for record in runs.records] == good
    reasons = {each.path.name: each.reason for each in runs.skipped}
    assert "not finished" in reasons["half"]
    assert "has 9 tasks" in reasons["long"]
    assert "cannot be read as JSON" in reasons["torn"]
    assert "lacks method" in reasons["bare"]
    assert "color" in reasons["odd"]
    assert "invalid tasks, got None" in reasons["wrong"]
    assert "invalid bytes, got {}" in reasons["hollow"]
    assert "no run directory" in reasons["empty"]
    for name in reasons:
        assert name in caplog.text


def test_nothing_left_and_no_such_directory_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run"):
        read_runs([tmp_path])
    with pytest.raises(UserError, match="no such directory"):
        read_runs([tmp_path / "nowhere"])
