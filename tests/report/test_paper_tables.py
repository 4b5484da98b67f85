"""Tables and curves for a paper: chosen metrics, percent, LaTeX that fits a column, sweeps."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import make_run, several

from perdure.core.errors import UserError
from perdure.report import figures, page
from perdure.report.comparison import Comparison, compare_groups
from perdure.report.figure_data import Summary
from perdure.report.scores import sweep_figures, swept_keys
from perdure.report.table_writers import COLUMN_POINTS, latex_tables, table_files, to_markdown
from perdure.report.tables import TableStyle, check_metrics, mode_table, read_metrics
from perdure.runs.records import read_runs

PAPER = TableStyle(("FGT", "ACC"), percent=True)
MODE = "task_agnostic"


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return compare_groups(several(tmp_path).groups)


def with_means(comparison: Comparison, metric: str, means: list[float]) -> Comparison:
    """Return the comparison with other means of one metric, without spread."""
    key = f"metrics.{MODE}.{metric}"
    cells = {label: dict(row) for label, row in comparison.cells.items()}
    for label, mean in zip(cells, means, strict=False):
        cells[label][key] = replace(cells[label][key], summary=Summary(1, mean, None))
    return replace(comparison, cells=cells)


def body(table: str) -> dict[str, list[str]]:
    """Return the cells of the rows of a tabular by their label."""
    lines = [line.removesuffix(r" \\").split(" & ") for line in table.splitlines() if " & " in line]
    return {label: cells for label, *cells in lines}


def test_chosen_metrics_have_their_order_and_percent(comparison: Comparison) -> None:
    header, rows = mode_table(comparison, MODE, style=PAPER).texts()
    assert header[:4] == ["method", "n", "FGT (%)", "ACC (%)"]
    (
        label,
        *_,
    ) = rows[0]
    cell = comparison.cell(label, f"metrics.{MODE}.ACC")
    assert cell is not None
    assert rows[0][3].split(" ± ")[0] == f"{100 * cell.summary.mean:.1f}"
    text = to_markdown(comparison, PAPER)
    assert "forgetting after each task" not in text
    assert "### cost" not in text
    assert "sent up" in to_markdown(comparison, TableStyle(("ACC", "sent up")))


def test_unknown_metrics_are_refused() -> None:
    assert read_metrics("ACC, FGT,") == ("ACC", "FGT")
    check_metrics(["ACC", "seconds", "macro_f1", "macro_f1 FGT"], ["macro_f1"])
    with pytest.raises(UserError, match=r"metrics: must be one of ACC, .*, got 'acc'"):
        check_metrics(["acc"], [])


def test_one_file_per_table(comparison: Comparison) -> None:
    names = set(table_files(comparison))
    assert {"table.csv", "table.md", f"table-{MODE}.tex", "table-cost.tex"} <= names
    assert f"table-{MODE}-forgetting.tex" in names
    assert set(table_files(comparison, PAPER)) == {
        "table.csv", "table.md", f"table-{MODE}.tex", "table-task_aware.tex", "table-routed.tex",
    }  # fmt: skip


def test_the_best_is_bold_and_the_second_underlined(comparison: Comparison) -> None:
    count = len(comparison.labels)
    assert count >= 3
    made = with_means(comparison, "ACC", [0.5, 0.7002, 0.6, 0.2, 0.1, 0.3][:count])
    made = with_means(made, "FGT", [0.5, 0.7, 0.1, 0.6, 0.6, 0.6][:count])
    rows = body(latex_tables(made, TableStyle(("ACC", "FGT"), True))[f"table-{MODE}.tex"])
    first, second, third, *_ = (rows[label.replace("_", r"\_")] for label in made.labels)
    assert first == ["50.0", r"\underline{50.0}"]
    assert second == [r"\textbf{70.0}", "70.0"]
    assert third == [r"\underline{60.0}", r"\textbf{10.0}"]


def test_equal_texts_share_a_rank_and_references_have_none(comparison: Comparison) -> None:
    count = len(comparison.labels)
    made = with_means(comparison, "ACC", [0.5, 0.50001, 0.4, *[0.9] * 9][:count])
    made = replace(made, references=tuple(made.labels[3:]))
    rows = body(latex_tables(made, TableStyle(("ACC",)))[f"table-{MODE}.tex"])
    cells = [rows[label.replace("_", r"\_")] for label in made.labels]
    assert cells[:3] == [[r"\textbf{0.500}"], [r"\textbf{0.500}"], [r"\underline{0.400}"]]
    assert all(cell == ["0.900"] for cell in cells[3:])


def test_names_are_escaped(comparison: Comparison) -> None:
    first, *others = comparison.labels
    cells = {r"a&b_c\x{<$": comparison.cells[first]} | {n: comparison.cells[n] for n in others}
    text = latex_tables(replace(comparison, cells=cells))[f"table-{MODE}.tex"]
    assert r"a\&b\_c\textbackslash{}x\{$<$\$ &" in text


LONG = [
    "fedavg",
    "fedprotip-threshold=0.95-routing=sample-train.lr=0.05",
    "my_package.methods.AVeryLongNameOfAMethod",
]


def widest(comparison: Comparison, style: TableStyle | None) -> list[str]:
    cells = dict(zip(LONG, comparison.cells.values(), strict=False))
    return list(latex_tables(replace(comparison, cells=cells), style).values())


@pytest.mark.parametrize("style", [None, PAPER, TableStyle(("ACC", "FGT", "Avg", "F", "PD", "AF"))])
def test_every_part_has_few_columns(comparison: Comparison, style: TableStyle | None) -> None:
    for text in widest(comparison, style):
        for columns in re.findall(r"\\begin\{tabular\}\{@\{\}l(r+)@\{\}\}", text):
            assert len(columns) <= 5
        for row in body(text).values():  # a deviation is small, so that few letters count
            shown = [re.sub(r"\\[a-z]+|[{}$,]", "", cell) for cell in row]
            assert sum(len(cell) for cell in shown) * 4.2 < COLUMN_POINTS


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_sets_every_table_within_a_column(comparison: Comparison, tmp_path: Path) -> None:
    texts = [*widest(comparison, None), *widest(comparison, PAPER)]
    boxes = "".join(f"\\noindent\\parbox{{{COLUMN_POINTS}pt}}{{%\n{text}}}\n\n" for text in texts)
    packages = "\\documentclass{article}\\usepackage{booktabs}\\hfuzz=0.5pt"
    document = f"{packages}\\begin{{document}}\n{boxes}\\end{{document}}\n"
    (tmp_path / "x.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "x.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


def test_a_sweep_is_drawn_as_curves(tmp_path: Path) -> None:
    for kind in ("fedavg", "fedprox"):
        for lr in (0.1, 0.01, 0.001):
            for seed in (0, 1):
                path = tmp_path / f"{kind}-train.lr={lr}" / f"seed-{seed}"
                make_run(path, kind, seed, 0.5 + lr, {"train": {"lr": lr}})
    runs = read_runs([tmp_path])
    assert swept_keys(list(runs.groups.values())) == ["train.lr"]
    acc, fgt = sweep_figures(runs, MODE)
    assert (acc.key, fgt.key) == (f"sweep-train-lr-ACC-{MODE}", f"sweep-train-lr-FGT-{MODE}")
    assert acc.x.names == ("0.001", "0.01", "0.1")
    assert [line.name for line in acc.series] == ["fedavg", "fedprox"]
    records = [r for r in runs.records if r.kind == "fedavg" and r.config.train.lr == 0.01]
    mean = sum(r.result["metrics"][MODE]["ACC"] for r in records) / 2
    assert acc.series[0].points[1].x == 1.0
    assert acc.series[0].points[1].y.mean == pytest.approx(mean)
    drawn = figures(runs)[acc.key].axes[0]
    assert [label.get_text() for label in drawn.get_xticklabels()] == ["0.001", "0.01", "0.1"]
    assert 'id="figure-sweep-train-lr-ACC' in page(runs)


def test_two_swept_keys_give_one_line_per_value_of_the_other(tmp_path: Path) -> None:
    for mu in (0.1, 1.0):
        for lr in (0.1, 0.01):
            method = {"method": {"kind": "fedprox", "mu": mu}, "train": {"lr": lr}}
            make_run(tmp_path / f"{mu}-{lr}" / "seed-0", "fedprox", 0, 0.8, method)
    groups = list(read_runs([tmp_path]).groups.values())
    assert set(swept_keys(groups)) == {"method.mu", "train.lr"}
    shown = {figure.key: figure for figure in sweep_figures(read_runs([tmp_path]), MODE)}
    lines = shown[f"sweep-train-lr-ACC-{MODE}"].series
    assert {line.name for line in lines} == {"fedprox mu=0.1", "fedprox mu=1.0"}


def test_runs_without_a_sweep_have_no_curves(tmp_path: Path) -> None:
    assert sweep_figures(several(tmp_path), MODE) == []
