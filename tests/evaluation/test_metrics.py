"""Metrics against numbers worked out by hand and against numpy formulas written here."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.evaluation.forgetting import DEFINITIONS, forgetting_by_task, metrics

COMPARISONS = {"FT", "FGT", "worst_drop", "AF", "BWT", "PD", "F"}

accuracies = st.floats(0, 1, allow_nan=False, width=32)


@st.composite
def matrices(draw, least=2, most=6):
    tasks = draw(st.integers(least, most))
    return [
        [draw(accuracies) for _ in range(i + 1)] + [None] * (tasks - i - 1) for i in range(tasks)
    ]


def lower(matrix):
    return np.array([[np.nan if a is None else a for a in row] for row in matrix])


def test_three_tasks_worked_out_by_hand():
    # Task 1: 0.9 then 0.95 (best) then 0.6; task 2: 0.8 then 0.7; task 3: 0.5.
    found = metrics([[0.9, None, None], [0.95, 0.8, None], [0.6, 0.7, 0.5]])
    assert found == pytest.approx(
        {
            "ACC": 0.6,  # (0.6 + 0.7 + 0.5) / 3
            "FT": 0.15,  # ((0.95 - 0.6) + (0.8 - 0.7)) / 3
            "FGT": 0.2,  # ((0.9 - 0.6) + (0.8 - 0.7)) / 2
            "learned": (0.9 + 0.8 + 0.5) / 3,
            "worst_drop": 0.3,  # of task 1, from 0.9 to 0.6
            "AF": 0.225,  # (0.35 + 0.1) / 2
            "BWT": -0.2,
            "Avg": (0.9 + 0.875 + 0.6) / 3,
            "PD": 0.3,  # 0.9 - 0.6
            "F": 0.0875,  # F_2 = 0.9 - 0.95 = -0.05; F_3 = 0.225
        }
    )


def test_forgetting_after_each_task_worked_out_by_hand():
    found = forgetting_by_task([[0.9, None, None], [0.95, 0.8, None], [0.6, 0.7, 0.5]])
    assert found[0] is None
    assert found[1:] == pytest.approx([-0.05, 0.225])
    assert forgetting_by_task([]) == []


def test_learning_that_helps_earlier_tasks_counts_as_negative_forgetting():
    found = metrics([[0.5, None], [0.75, 1.0]])
    assert found["FT"] == -0.125
    assert found["FGT"] == found["AF"] == found["F"] == -0.25
    assert found["BWT"] == 0.25
    assert found["PD"] == -0.375


def test_metrics_that_compare_tasks_are_none_after_one_task():
    found = metrics([[0.75]])
    assert found == {"ACC": 0.75, "Avg": 0.75, "learned": 0.75} | dict.fromkeys(COMPARISONS)


def test_all_metrics_are_none_before_the_first_task():
    assert metrics([]) == dict.fromkeys(DEFINITIONS)


def test_an_unfinished_run_is_measured_over_its_finished_tasks():
    whole = [[0.9, None, None], [0.7, 0.8, None], [0.6, 0.7, 0.5]]
    assert metrics(whole[:2]) == metrics([[0.9, None], [0.7, 0.8]])
    assert metrics(whole[:1]) == metrics([[0.9]])


@pytest.mark.parametrize("matrix", [[[None]], [[0.5], [0.5]], [[0.5], [None, 0.5]]])
def test_a_hole_in_the_matrix_is_refused(matrix):
    with pytest.raises(ValueError, match="row"):
        metrics(matrix)


def test_every_metric_has_a_definition_with_its_paper():
    assert list(metrics([[0.5, None], [0.5, 0.5]])) == list(DEFINITIONS)
    for name, paper in [
        ("FT", "FedProTIP"),
        ("FGT", "FOT"),
        ("AF", "STAMP"),
        ("worst_drop", "SPECIAL"),
        ("PD", "PIP"),
    ]:
        assert f"({paper})" in DEFINITIONS[name]


@given(matrices())
def test_formulas_agree_with_numpy(matrix):
    a = lower(matrix)
    tasks = len(a)
    best_before_last = np.nanmax(a[:-1, :-1], axis=0)
    means = np.nanmean(a, axis=1)
    forgetting = [np.mean(np.nanmax(a[:t, :t], axis=0) - a[t, :t]) for t in range(1, tasks)]
    assert metrics(matrix) == pytest.approx(
        {
            "ACC": a[-1].mean(),
            "FT": (best_before_last - a[-1, :-1]).sum() / tasks,
            "FGT": (np.diag(a)[:-1] - a[-1, :-1]).mean(),
            "learned": np.trace(a) / len(a),
            "worst_drop": (np.diag(a)[:-1] - a[-1, :-1]).max(),
            "AF": (best_before_last - a[-1, :-1]).mean(),
            "BWT": (a[-1, :-1] - np.diag(a)[:-1]).mean(),
            "Avg": means.mean(),
            "PD": means[0] - means[-1],
            "F": np.mean(forgetting),
        },
        abs=1e-9,
    )


@given(matrices())
def test_relations_that_hold_for_every_matrix(matrix):
    found = metrics(matrix)
    tasks = len(matrix)
    assert found["BWT"] == -found["FGT"]
    assert found["AF"] >= found["FGT"] - 1e-12
    assert found["FT"] == pytest.approx(found["AF"] * (tasks - 1) / tasks)
    assert 0 <= found["ACC"] <= 1 + 1e-12
    assert 0 <= found["Avg"] <= 1 + 1e-12
    assert all(-1 <= found[name] <= 1 for name in COMPARISONS)


@given(st.floats(0, 1), st.integers(2, 6))
def test_a_constant_accuracy_forgets_nothing(accuracy, tasks):
    found = metrics([[accuracy] * (i + 1) for i in range(tasks)])
    assert found["ACC"] == pytest.approx(accuracy)
    assert all(found[name] == pytest.approx(0, abs=1e-12) for name in COMPARISONS)


@given(matrices(least=3), st.randoms())
def test_acc_does_not_depend_on_which_task_is_which(matrix, random):
    shuffled = [list(row) for row in matrix]
    random.shuffle(shuffled[-1])
    assert metrics(shuffled)["ACC"] == pytest.approx(metrics(matrix)["ACC"])


@given(matrices())
def test_the_width_of_the_rows_does_not_matter(matrix):
    ragged = [row[: i + 1] for i, row in enumerate(matrix)]
    assert metrics(ragged) == metrics(matrix)
