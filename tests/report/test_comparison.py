"""The comparison table and the files that it becomes."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from pathlib import Path

import pytest
from made_runs import several

from perdure.cli.compare import comparison_tables
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.evaluation.forgetting import DEFINITIONS
from perdure.report.comparison import Comparison, compare_groups
from perdure.report.page import differences_html, table_html
from perdure.report.records import RunRecord
from perdure.report.table_writers import to_csv, to_markdown
from perdure.report.tables import format_bytes, measures_table, mode_table, table_sections


def record(label: str, seed: int, acc: float, routed: float | None = None) -> RunRecord:
    values = {**dict.fromkeys(DEFINITIONS), "ACC": acc, "FGT": 1 - acc}
    routes = {**values, "ACC": routed} if routed is not None else None
    result = {
        "tasks": 2,
        "metrics": {"task_agnostic": values, "task_aware": None, "routed": routes},
        "bytes": {"up": 1_500_000, "down": 20},
        "seconds": {"total": 2.0 + seed},
        "peak_rss_mb": None,
    }
    return RunRecord(Path(label), parse({"seed": seed}), result)


GROUPS = {
    "plain_one": [record("plain_one", s, acc) for s, acc in enumerate((0.5, 0.6, 0.7))],
    "ours & co": [record("ours", s, acc, 0.9) for s, acc in enumerate((0.6, 0.8, 0.7))],
}


@pytest.fixture
def comparison() -> Comparison:
    return compare_groups(GROUPS)


def test_only_what_was_measured_is_in_the_table(comparison: Comparison) -> None:
    assert comparison.modes == ["task_agnostic", "routed"]
    assert [m.name for m in comparison.measures_of("task_agnostic")] == ["ACC", "FGT"]
    assert [m.name for m in comparison.measures_of(None)] == ["sent up", "sent down", "seconds"]
    assert comparison.cell("plain_one", "metrics.routed.ACC") is None


def test_numbers_are_those_of_the_standard_library(comparison: Comparison) -> None:
    cell = comparison.cell("ours & co", "metrics.task_agnostic.ACC")
    assert cell is not None
    assert cell.summary.mean == pytest.approx(statistics.mean([0.6, 0.8, 0.7]))
    assert cell.summary.std == pytest.approx(statistics.stdev([0.6, 0.8, 0.7]))
    assert cell.difference is not None
    assert cell.difference.mean == pytest.approx(0.1)
    # by hand: gaps .1 .2 0, s = .1, t(2, .975) = 4.302653, half width 4.302653 * .1 / sqrt 3
    assert cell.difference.high == pytest.approx(0.1 + 0.2484138, abs=1e-6)


def test_the_reference_comes_first_and_has_no_difference() -> None:
    turned = compare_groups(GROUPS, reference="ours & co")
    assert turned.labels == ["ours & co", "plain_one"]
    first = turned.cell("ours & co", "metrics.task_agnostic.ACC")
    assert first is not None
    assert first.difference is None
    with pytest.raises(UserError, match="must be plain_one, ours & co"):
        compare_groups(GROUPS, reference="nobody")


def test_rows_are_readable(comparison: Comparison) -> None:
    header, rows = mode_table(comparison, "task_agnostic").texts()
    assert header[-1] == "FGT against plain_one"
    assert rows[0] == ["plain_one", "3", "0.600 ± 0.100", "0.400 ± 0.100", "-", "-"]
    assert rows[1][4] == "+0.100 [-0.148, +0.348]"
    _, costs = mode_table(comparison, None).texts()
    assert costs[0] == ["plain_one", "3", "1.5 MB", "20 B", "3.0 ± 1.0"]


def test_forgetting_after_each_task_is_a_separate_table(tmp_path: Path) -> None:
    comparison = compare_groups(several(tmp_path).groups)
    names = [m.name for m in comparison.measures_of("task_agnostic")]
    assert names == list(DEFINITIONS)
    assert names.index("learned") == names.index("FGT") + 1
    measures = comparison.measures_by_task("task_agnostic")
    header, rows = measures_table(comparison, measures).texts()
    assert header == ["method", "n", "F_2", "F_3"]
    assert [row[0] for row in rows] == comparison.labels
    assert "### task_agnostic: forgetting after each task" in to_markdown(comparison)


def test_what_was_learned_stands_beside_forgetting_in_every_table(tmp_path: Path) -> None:
    comparison = compare_groups(several(tmp_path).groups)
    *shown, costs = comparison_tables(comparison)
    titles = [[str(column.header) for column in table.columns] for table in shown]
    mode = "task_agnostic"
    pages = [
        table_html(mode_table(comparison, mode, differences=())),
        *differences_html(comparison, mode)[1:],
    ]
    titles += [re.findall('<th scope="col"[^>]*>([^<]*)', html) for html in pages]
    assert len(pages) == 2
    for names in titles:
        assert names[names.index("FGT") + 1] == "learned"
    assert all("worst_drop" in names for names in titles[len(shown) :])
    known = {str(column.header) for column in costs.columns}
    assert {"sent up", "up per client", "kept per client"} <= known


def test_one_seed_shows_no_interval() -> None:
    single = {label: group[:1] for label, group in GROUPS.items()}
    _, rows = mode_table(compare_groups(single), "task_agnostic").texts()
    assert rows[1] == ["ours & co", "1", "0.600", "0.400", "+0.100", "-0.100"]


def test_csv_has_full_digits_and_every_measure(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert len(rows) == 2 * len(comparison.measures)
    (row,) = (
        r
        for r in rows
        if (r["method"], r["mode"], r["measure"]) == ("ours & co", "task_agnostic", "ACC")
    )
    assert float(row["mean"]) == pytest.approx(0.7, abs=1e-15)
    assert float(row["difference"]) == pytest.approx(0.1)
    assert row["definition"] == DEFINITIONS["ACC"]


def test_markdown_tables_are_well_formed_and_say_what_they_show(comparison: Comparison) -> None:
    text = to_markdown(comparison)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables[:4]}) == 1
    assert "95% interval of Student's t" in text
    assert "divided by n-1" in text
    assert DEFINITIONS["FGT"] in text


def test_the_plain_form_is_json(comparison: Comparison) -> None:
    found = json.loads(json.dumps(comparison.to_dict()))
    cell = found["cells"]["ours & co"]["metrics.task_agnostic.ACC"]
    assert cell["by_seed"] == {"0": 0.6, "1": 0.8, "2": 0.7}
    assert cell["difference"]["count"] == 3
    assert "Student t" in found["interval"]


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (7, 999, 1000, 2.5e9)] == ["7 B", "999 B", "1.0 kB", "2.5 GB"]


def test_modes_with_the_same_figures_share_a_table() -> None:
    (first, *_), _ = GROUPS.values()
    metrics = first.result["metrics"]
    both = {**metrics, "task_aware": metrics["task_agnostic"]}
    twin = RunRecord(first.path, first.config, {**first.result, "metrics": both})
    assert table_sections(compare_groups({"x": [twin]})) == [
        ("task_agnostic, task_aware", "task_agnostic"),
        ("cost", None),
    ]
    assert [title for title, _ in table_sections(compare_groups(GROUPS))] == [
        "task_agnostic",
        "routed",
        "cost",
    ]
