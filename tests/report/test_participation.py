"""The table of rounds in which each client of a federation took part."""

from __future__ import annotations

from pathlib import Path

from made_runs import make_run

from perdure.report.page import page
from perdure.report.participation import participation
from perdure.report.run_records import read_runs


def test_a_federation_has_a_row_per_client(tmp_path: Path) -> None:
    counts = {
        "10": {"sampled": 7, "counted": 5, "failed": 2},
        "9": {"sampled": 6, "counted": 6, "failed": 0},
    }
    runs = read_runs([make_run(tmp_path / "run", participation=counts)])
    text = "".join(participation(runs))
    assert text.index(">9<") < text.index(">10<")
    assert [text.count(f">{number}<") for number in (7, 5, 2)] == [1, 1, 1]
    assert "Participation" in page(runs)


def test_simulations_and_earlier_results_have_no_table(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "earlier"), make_run(tmp_path / "now", participation=None)]
    for folder in folders:
        runs = read_runs([folder])
        assert participation(runs) == []
        assert "Participation" not in page(runs)
