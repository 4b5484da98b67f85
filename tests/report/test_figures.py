"""What the figures say, worked out a second time."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from made_runs import LAYERS, TASKS, Matrix, confusion, make_run, matrix, several
from matplotlib import pyplot as plt
from PIL import Image

from perdure.core.errors import UserError
from perdure.evaluation.forgetting import metrics
from perdure.report import figures
from perdure.report.accuracy import (
    average_accuracies,
    forgetting_per_task,
    repeated_modes,
    shown_modes,
)
from perdure.report.diagnostics import MethodLog
from perdure.report.figure_data import HeatMapFigure, LineFigure, Series
from perdure.report.matplotlib_charts import draw, save
from perdure.report.page import all_figures
from perdure.report.records import Runs
from perdure.report.scores import byte_unit, cumulative_bytes
from perdure.runs.records import read_run, read_runs

HAND: Matrix = [[0.9, None, None], [0.7, 0.8, None], [0.6, 0.9, 1.0]]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return several(tmp_path)


def named(runs: Runs, key: str) -> Any:
    (found,) = (figure for figure in all_figures(runs) if figure.key == key)
    return found


def line(figure: LineFigure, name: str) -> Series:
    (found,) = (each for each in figure.series if each.name == name)
    return found


def test_averages_and_drops_of_a_matrix_by_hand() -> None:
    assert average_accuracies(HAND) == [
        (1, 0.9),
        (2, pytest.approx(0.75)),
        (3, pytest.approx(2.5 / 3)),
    ]
    assert forgetting_per_task(HAND) == [(1, pytest.approx(0.3)), (2, pytest.approx(-0.1))]


def test_the_lines_end_where_the_metrics_are(runs: Runs) -> None:
    """Captions say so: the last A_t is ACC, their mean is Avg, the mean drop is AF."""
    for seed in (0, 1):
        table = matrix(seed, 0.9)
        found = metrics(table)
        a = [value for _, value in average_accuracies(table)]
        assert (a[-1], np.mean(a)) == (pytest.approx(found["ACC"]), pytest.approx(found["Avg"]))
        assert np.mean([value for _, value in forgetting_per_task(table)]) == pytest.approx(
            found["AF"]
        )


def test_seeds_become_a_mean_and_a_sample_deviation(runs: Runs) -> None:
    tables = np.array([matrix(seed, 0.9) for seed in (0, 1)], dtype=float)
    heat: HeatMapFigure = named(runs, "matrix-task_agnostic")
    for i in range(TASKS):
        for j in range(i + 1):
            cell = heat.panels[0].cells[i][j]
            assert cell is not None
            assert cell.mean == pytest.approx(tables[:, i, j].mean())
            assert cell.std == pytest.approx(tables[:, i, j].std(ddof=1))
    first = line(named(runs, "first-task-task_agnostic"), "fot")
    assert [point.y.mean for point in first.points] == pytest.approx(tables[:, :, 0].mean(0))
    last = line(named(runs, "learning-task_agnostic"), "fot")
    diagonal = tables[:, range(TASKS), range(TASKS)]
    assert [point.y.std for point in last.points] == pytest.approx(diagonal.std(0, ddof=1))


def test_only_methods_that_route_have_routed_figures(runs: Runs) -> None:
    assert [panel.name for panel in named(runs, "matrix-routed").panels] == ["fedprotip"]
    (panel,) = named(runs, "confusion").panels
    means = [[cell.mean for cell in row] for row in panel.cells]
    assert means == [pytest.approx(row) for row in confusion(TASKS)]
    assert line(named(runs, "bytes-routed"), "fedprotip").style == 2  # its own in every figure


def test_costs_are_summed_over_tasks(runs: Runs) -> None:
    assert cumulative_bytes(runs.records[0]) == [3e6, 6e6, 9e6]
    assert [point.x for point in named(runs, "bytes-task_agnostic").series[0].points] == [3, 6, 9]
    assert "(MB)" in named(runs, "bytes-task_agnostic").x.label
    assert [point.x for point in named(runs, "seconds-task_agnostic").series[0].points] == [2, 4, 6]
    units = [byte_unit(most)[1] for most in (0, 999, 1000, 2.5e6, 1e9, 1e18)]
    assert units == ["B", "B", "kB", "MB", "GB", "TB"]


def test_spaces_and_conflicts_come_from_the_events(runs: Runs) -> None:
    panels = named(runs, "space").panels
    assert [panel.name for panel in panels] == ["fot", "fedprotip"]
    assert panels[0].rows == LAYERS
    assert [cell.mean for cell in panels[0].cells[1]] == pytest.approx([0.2, 0.4, 0.6])
    cosine = named(runs, "cosine")
    assert [each.name for each in cosine.series] == ["stamp, clients", "stamp, a client's tasks"]
    assert [point.y.mean for point in cosine.series[0].points] == pytest.approx(
        [0.0, 0.0, 0.1, 0.1, 0.2, 0.2]
    )
    (conflicts,) = named(runs, "conflicts").series
    assert [point.y.mean for point in conflicts.points] == pytest.approx([0.4] * 6)


def test_parts_of_a_combined_method_are_found(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    part = '{"event": "task", "task": 0, "method": {"fedprotip": {"used": {"fc1": 0.5}}}}\n'
    (run / "events.jsonl").write_text(part)
    assert MethodLog(read_run(run)).used_fractions() == {"fc1": [0.5]}


def test_events_that_cannot_be_read_cost_only_their_figures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path / "run", "fot")
    (run / "events.jsonl").write_text("no json\n")
    keys = [figure.key for figure in all_figures(read_runs([run]))]
    assert "space" not in keys
    assert "matrix-task_agnostic" in keys
    assert "events.jsonl: line 1 is not an event" in caplog.text


def test_a_mode_that_repeats_another_is_left_out(tmp_path: Path) -> None:
    same = matrix(0, 0.9)
    make_run(tmp_path / "run", matrix={"task_agnostic": same, "task_aware": same, "routed": None})
    runs = read_runs([tmp_path])
    assert (shown_modes(runs), repeated_modes(runs)) == (["task_agnostic"], ["task_aware"])


def test_one_task_has_no_figures_that_compare_moments(tmp_path: Path) -> None:
    make_run(tmp_path / "run", tasks=1)
    keys = {figure.key for figure in all_figures(read_runs([tmp_path]))}
    assert "matrix-task_agnostic" in keys
    assert "forgetting-task_agnostic" not in keys


def test_image_files_hold_every_figure_of_the_page(tmp_path: Path) -> None:
    """Of few runs: a figure takes matplotlib a quarter of a second."""
    for seed in (0, 1):
        one_mode = {"task_agnostic": matrix(seed, 0.9), "task_aware": None, "routed": None}
        make_run(tmp_path / "runs" / f"seed-{seed}", "fot", seed, matrix=one_mode)
    runs, out = read_runs([tmp_path / "runs"]), tmp_path / "out"
    before = dict(mpl.rcParams)
    made = figures(runs, out)
    keys = [figure.key for figure in all_figures(runs)]
    assert list(made) == keys
    for key in keys:
        with Image.open(out / f"{key}.png") as image:
            assert min(image.size) > 200
        assert ET.parse(out / f"{key}.svg").getroot().tag.endswith("svg")
    assert plt.get_fignums() == []
    assert dict(mpl.rcParams) == before


def test_the_same_figure_gives_the_same_svg(runs: Runs, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save({"space": draw(named(runs, "space"))}, tmp_path, ["svg"])
        (tmp_path / "space.svg").rename(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_image_files_where_none_can_be(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out='.*file': cannot be created"):
        figures(runs, tmp_path / "file")
    with pytest.raises(UserError, match="formats: must be png, svg, pdf, got 'bmp'"):
        figures(runs, tmp_path / "out", formats=["bmp"])
