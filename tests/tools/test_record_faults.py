"""The table of `make faults`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from record_faults import record, table


def row(name: str, engine: str = "serial", kills: int = 10, differences: int = 0) -> dict:
    counts = {"kills": kills, "runs": 2, "differences": differences}
    return {"section": "methods", "name": name, "engine": engine, **counts}


def test_counts_take_the_place_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    record([row("fot", kills=1), row("er")], path)
    record([row("fot"), row("fot", "vector")], path)
    assert json.loads(path.read_text()) == [row("er"), row("fot"), row("fot", "vector")]


def test_the_table_has_a_total_per_section() -> None:
    other = row("fedavg") | {"section": "federations"}
    lines = [
        line.split() for line in table([other, row("er", differences=1), row("fot")]).splitlines()
    ]
    assert lines[0] == ["kills", "runs", "differences"]
    assert ["federations", "together", "10", "2", "0"] in lines
    assert lines[-1] == ["methods", "together", "20", "4", "1"]
