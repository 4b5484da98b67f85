"""The table of rounds in which each client of a federation took part."""

from __future__ import annotations

from pathlib import Path

from made_runs import make_run

from perdure.report.page import page
from perdure.report.sections import page_title, participation, settings_sentence
from perdure.runs.records import read_runs


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


def test_simulations_have_no_table(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "run", participation=None)])
    assert participation(runs) == []
    assert "Participation" not in page(runs)


def test_the_report_of_nodes_with_own_data_names_no_other_data(tmp_path: Path) -> None:
    federation = {"classes": ["a", "b"], "shape": [1, 8, 8]}
    data = {"mean": [0.5], "std": [0.5]}
    config = {"federation": federation, "data": data, "stream": {"kind": "domains", "tasks": 3}}
    runs = read_runs([make_run(tmp_path / "run", config=config)])
    assert page_title(runs) == "fedavg on domains data of nodes, seed 0"
    assert "10 clients, model" in settings_sentence(runs)
    simulated = read_runs([make_run(tmp_path / "simulated")])
    assert page_title(simulated).endswith(" digits, seed 0")
    assert "10 clients (iid), model" in settings_sentence(simulated)
