"""The catalog of claims, the runs that it plans and the verdicts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from claims.__main__ import main, seconds_of
from claims.catalog import PAPERS, Catalog, read_catalog
from claims.reproduction_page import reproduction_page
from claims.verdicts import Plan, evaluate_claim, find_measure, make_plan
from perdure.config import dump_saved
from perdure.core.errors import UserError
from perdure.training.settings import with_method_defaults
from tools.results import code_hash

SMALL = """
settings:
  tiny:
    config:
      data: {limit: 120}
      stream: {tasks: 2}
      clients: {count: 3}
      model: {hidden: [8]}
      train: {rounds: 1}
  absent:
    config: {data: {source: npz, path: x}}
    data: {data.path: nowhere.npz}
claims:
  - {id: one, paper: FOT, where: Table 1, says: much, setting: tiny,
     runs: {a: {kind: fedprox, mu: 1.0}, b: {kind: fedavg}}, holds: a.ACC > b.ACC}
  - {id: two, paper: FOT, where: Table 2, says: the | same, setting: tiny,
     runs: {b: {kind: fedavg}}, holds: b.up < 100}
  - {id: three, paper: PIP, where: Table 3, says: no data, setting: absent,
     runs: {b: {kind: fedavg}}, holds: b.ACC > 0}
  - {id: four, paper: PIP, where: Table 4, says: too large, untestable: it is too large}
"""


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    path = tmp_path / "claims.yaml"
    path.write_text(SMALL)
    return read_catalog(path)


def _finish(out: Path, catalog: Catalog, accuracies: dict[str, list[float]]) -> Plan:
    """Results as if the runs had been made."""
    plan = make_plan(catalog, out, None)
    for name, values in accuracies.items():
        for run, value in zip(plan.runs[name], values, strict=False):
            run.path(out).mkdir(parents=True)
            (run.path(out) / "config.yaml").write_text(dump_saved(with_method_defaults(run.config)))
            result = {
                "method": "x", "seed": run.seed, "tasks": 2,
                "matrix": {}, "seconds": {"total": 1.0, "by_task": [0.5, 0.5]},
                "metrics": {"task_agnostic": {"ACC": value}}, "measure": "accuracy",
                "bytes": {"up": 1000, "down": 1, "by_task": [], "by_field": {}, "types": {},
                          "kept": None}, "draws": "those of a seed",
            }  # fmt: skip
            (run.path(out) / "result.json").write_text(json.dumps(result))
    return plan


def test_runs_that_claims_share_are_planned_once(tmp_path: Path, catalog: Catalog) -> None:
    plan = make_plan(catalog, tmp_path, None)
    assert sorted(plan.runs) == ["tiny/fedavg", "tiny/fedprox-mu=1.0"]
    assert len(plan.all) == 6
    assert plan.refused == {"absent/fedavg": "requires nowhere.npz in the folder of --data"}


def test_verdicts(tmp_path: Path, catalog: Catalog) -> None:
    values = {"tiny/fedavg": [0.5, 0.5, 0.5], "tiny/fedprox-mu=1.0": [0.9, 0.4, 0.6]}
    plan = _finish(tmp_path, catalog, values)
    one, two, three, four = (evaluate_claim(claim, plan, tmp_path) for claim in catalog.claims)
    assert (one.word, one.seeds, one.seeds_that_agree) == ("holds", 3, 2)
    assert [round(each.summary.mean, 6) for each in one.measured if each.summary] == [
        0.633333,
        0.5,
    ]
    assert (two.word, two.seeds_that_agree) == ("does not hold", 0)
    assert (three.word, three.reason) == ("not run", "requires nowhere.npz in the folder of --data")
    assert (four.word, four.reason) == ("not testable", "it is too large")


def test_only_seeds_that_all_runs_have_are_judged(tmp_path: Path, catalog: Catalog) -> None:
    plan = _finish(tmp_path, catalog, {"tiny/fedavg": [0.5], "tiny/fedprox-mu=1.0": [0.4, 0.9]})
    verdict = evaluate_claim(catalog.claims[0], plan, tmp_path)
    assert (verdict.word, verdict.seeds) == ("does not hold", 1)


def test_nothing_finished_is_not_run(tmp_path: Path, catalog: Catalog) -> None:
    verdict = evaluate_claim(catalog.claims[0], make_plan(catalog, tmp_path, None), tmp_path)
    assert (verdict.word, verdict.reason) == ("not run", "no seed is finished for all of its runs")


def test_the_page_has_every_claim(tmp_path: Path, catalog: Catalog) -> None:
    values = {"tiny/fedavg": [0.5, 0.5, 0.5], "tiny/fedprox-mu=1.0": [0.9, 0.4, 0.6]}
    plan = _finish(tmp_path / "runs", catalog, values)
    verdicts = [evaluate_claim(claim, plan, tmp_path / "runs") for claim in catalog.claims]
    page = reproduction_page(catalog, verdicts, "python -m claims")
    assert "| FOT | 1 | 1 | 0 | 0 |" in page
    assert "a.ACC 63.3 ± 25.2<br>b.ACC 50.0 ± 0.0 | holds (2 of 3 seeds alone)" in page
    assert r"the \| same" in page
    assert "not testable: it is too large" in page


def test_every_paper_has_claims_with_criteria_that_can_be_read() -> None:
    catalog = read_catalog()
    counts = Counter(claim.paper for claim in catalog.claims if claim.criterion)
    assert set(counts) == set(PAPERS)
    assert min(counts.values()) >= 4
    for claim in catalog.claims:
        for name in claim.criterion.names if claim.criterion else ():
            find_measure(name.partition(".")[2])


def test_papers_are_chosen_by_name_in_any_case() -> None:
    assert {claim.paper for claim in read_catalog().for_papers(["fot", "PIP"]).claims} == {
        "FOT",
        "PIP",
    }
    with pytest.raises(UserError, match=r"--papers: must be one of FOT, .*PIP, got 'fott'"):
        read_catalog().for_papers(["fott"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"holds": "c.ACC > 1"}, "a value of a, b"),
        ({"setting": "nothing"}, "setting: must be one of absent, tiny, got 'nothing'"),
        ({"paper": "XYZ"}, "paper: must be one of FOT, .*, got 'XYZ'"),
        ({"untestable": "why"}, "either holds or untestable"),
    ],
)
def test_a_bad_claim_is_named(tmp_path: Path, change: dict[str, str], match: str) -> None:
    values = yaml.safe_load(SMALL)
    values["claims"][0] |= change
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=f"one: .*{match}"):
        read_catalog(tmp_path / "bad.yaml")


def test_the_list_shows_them_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--list", "--papers", "special"]) == 0
    said = capsys.readouterr().out
    assert "special-lambda-forgetting (SPECIAL, Figure 3 (i))" in said
    assert "low.BWT < middle.BWT < high.BWT" in said
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_written_from_what_is_finished(
    tmp_path: Path,
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("claims.__main__.read_catalog", lambda: catalog)
    _finish(Path("runs"), catalog, {"tiny/fedavg": [0.5]})
    assert main(["--no-run", "--out", "runs", "--write", "page.md"]) == 0
    assert "does not hold (0 of 1 seeds alone)" in capsys.readouterr().out
    assert "not run: no seed is finished for all of its runs" in Path("page.md").read_text()
    results = json.loads(Path("measured/claims.json").read_text())
    assert results["code"] == code_hash()
    assert results["claims"]["one"]["verdict"] == "not run"
    assert results["claims"]["two"]["measured"] == {"b.up": {"0": 1000.0}}
    page = Path("page.md").read_text()
    assert page.startswith("# What was reproduced\n\n<!-- figures: docs/measured/claims.json -->")
    assert page.endswith("<!-- /figures -->\n")
    assert main(["--no-run", "--write", "nowhere/page.md"]) == 2


def test_lists_and_verdicts_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--list", "--json", "--papers", "PIP"]) == 0
    listed = json.loads(capsys.readouterr().out)
    expected = read_catalog().for_papers(["pip"]).claims
    assert [row["id"] for row in listed] == [claim.id for claim in expected]
    assert main(["--no-run", "--json", "--papers", "special"]) == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert {row["verdict"] for row in verdicts} == {"not run", "not testable"}
    assert all(row["reason"] for row in verdicts)


def test_claims_are_chosen_by_their_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--json", "fot-forgetting", "fot-accuracy"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in listed] == ["fot-accuracy", "fot-forgetting"]
    assert main(["--list", "fot"]) == 2
    assert "ID: must be one of fot-accuracy, " in capsys.readouterr().err


def test_a_folder_with_runs_is_only_resumed(
    tmp_path: Path,
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("claims.__main__.read_catalog", lambda: catalog)
    values = {"tiny/fedavg": [0.5, 0.5, 0.5], "tiny/fedprox-mu=1.0": [0.9, 0.4, 0.6]}
    _finish(Path("runs"), catalog, values)
    assert main(["--out", "runs"]) == 2
    assert "--out runs: holds runs already; continue with --resume" in capsys.readouterr().err
    assert main(["--out", "runs", "--resume"]) == 0
    said = capsys.readouterr()
    assert "6 runs, 6 already finished" in said.out
    assert "holds (2 of 3 seeds alone)" in said.out


def test_after_the_budget_no_run_is_started_and_what_is_left_is_said(
    tmp_path: Path,
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("claims.__main__.read_catalog", lambda: catalog)
    _finish(Path("runs"), catalog, {"tiny/fedavg": [0.5, 0.5]})
    assert main(["--out", "runs", "--resume", "--budget", "0s", "--quiet", "two"]) == 0
    said = capsys.readouterr()
    assert "1 of 3 runs are left after 0s: tiny/fedavg/seed-2; resume with: " in said.err
    assert "python -m claims two --resume --out runs --budget 0s" in said.err
    assert "does not hold (0 of 2 seeds alone)" in said.out


def test_a_budget_is_a_number_with_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert [seconds_of(text) for text in ("90s", "45m", "1.5h")] == [90, 2700, 5400]
    with pytest.raises(UserError, match="--budget: must be a number with the unit s, m or h"):
        seconds_of("2 days")
