"""The tables of `make faults` and `make fuzz`."""

from __future__ import annotations

import json
from pathlib import Path

from tools.record_campaigns import read_rows, record, table, totals
from tools.results import code_hash


def row(name: str, engine: str = "serial", kills: int = 10, differences: int = 0) -> dict:
    counts = {"kills": kills, "runs": 2, "differences": differences}
    return {"section": "methods", "name": name, "engine": engine, **counts}


def test_counts_take_the_place_of_earlier_ones(tmp_path: Path) -> None:
    record("faults", [row("fot", kills=1), row("er")], tmp_path)
    record("faults", [row("fot"), row("fot", "vector")], tmp_path)
    assert read_rows("faults", tmp_path) == [row("er"), row("fot"), row("fot", "vector")]
    assert json.loads((tmp_path / "faults.json").read_text())["code"] == code_hash()


def test_counts_of_other_code_are_not_kept(tmp_path: Path) -> None:
    earlier = {"code": "other", "rows": [row("er")]}
    (tmp_path / "faults.json").write_text(json.dumps(earlier))
    record("faults", [row("fot")], tmp_path)
    assert read_rows("faults", tmp_path) == [row("fot")]


def test_the_table_has_a_total_per_section(tmp_path: Path) -> None:
    other = row("fedavg") | {"section": "federations"}
    record("faults", [other, row("er", differences=1), row("fot")], tmp_path)
    lines = [line.split() for line in table("faults", tmp_path).splitlines()]
    assert lines[0] == ["section", "name", "engine", "kills", "runs", "differences"]
    assert lines[-1] == ["methods", "together", "20", "4", "1"]
    assert totals("faults", tmp_path).splitlines()[2:] == [
        "| federations | 10 | 2 | 0 |",
        "| methods | 20 | 4 | 1 |",
    ]


def test_memory_of_a_kind_is_the_largest(tmp_path: Path) -> None:
    counts = {"messages": 1250, "refused": 1000, "surprises": 0, "mb": 7}
    record("fuzz", [{"kind": "replies", **counts}], tmp_path)
    record("fuzz", [{"kind": "stored", **counts, "mb": 9}], tmp_path)
    assert totals("fuzz", tmp_path).splitlines()[2:] == [
        "| replies | 1,250 | 1,000 | 0 | 7 |",
        "| stored | 1,250 | 1,000 | 0 | 9 |",
    ]
