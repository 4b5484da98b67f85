"""Metrics from counts, against scikit-learn on the predictions themselves."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    f1_score,
    mean_absolute_error,
    r2_score,
    recall_score,
    roc_auc_score,
)

from perdure.core.errors import UserError
from perdure.evaluation.counts import (
    CLASS_COUNTS,
    ScoreCounts,
    count_numbers,
    count_rows,
    is_possible,
    score_rows,
)
from perdure.evaluation.metrics import METRICS, make_metrics

GUIDE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def drawn(outputs: int, classes: tuple[int, ...], scale: float, rows: int = 1500):
    """Return logits that know something about their labels, double [rows, outputs]."""
    draw = np.random.default_rng(outputs)
    labels = draw.choice(classes, rows)
    logits = draw.normal(size=(rows, outputs)) + 1.2 * np.eye(outputs)[labels]
    return torch.tensor(logits * scale), torch.tensor(labels)


def counted(logits, labels, classes, output_labels=None) -> ScoreCounts:
    if output_labels is None:
        output_labels = torch.arange(logits.shape[1])
    known = len(set(output_labels.tolist()))
    rows = score_rows(logits, labels, output_labels, classes, known)
    return ScoreCounts(classes, known == 2, count_rows(rows, CLASS_COUNTS))


def value(name: str, counts: ScoreCounts) -> float:
    return METRICS.find(name)().value(counts)


CASES = [(2, (0, 1), 1.0), (5, (0, 1, 2, 3, 4), 3.0), (10, (4, 5, 7), 1.0), (40, (3, 9), 0.2)]


@pytest.mark.parametrize(("outputs", "classes", "scale"), CASES)
@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_auroc_is_that_of_the_probabilities(outputs, classes, scale, sharpness) -> None:
    """Sharp networks are nearly always sure, so that equal bins of probability would be empty."""
    logits, labels = drawn(outputs, classes, scale * sharpness)
    odds = logits - torch.stack(
        [logits[:, [j for j in range(outputs) if j != k]].logsumexp(1) for k in range(outputs)], 1
    )
    exact = np.mean([roc_auc_score(labels == k, odds[:, k]) for k in classes])
    assert value("auroc", counted(logits, labels, classes)) == pytest.approx(exact, abs=2e-3)


@pytest.mark.parametrize(("outputs", "classes", "scale"), CASES)
def test_f1_recall_and_specificity_are_exact(outputs, classes, scale) -> None:
    logits, labels = drawn(outputs, classes, scale)
    counts, predicted = counted(logits, labels, classes), logits.argmax(1)
    f1 = f1_score(labels, predicted, labels=classes, average="macro")
    recalls = recall_score(labels, predicted, labels=classes, average=None)
    others = [recall_score(labels != k, predicted != k) for k in classes]
    binary = outputs == 2
    assert value("macro_f1", counts) == pytest.approx(f1, abs=1e-12)
    assert value("accuracy", counts) == pytest.approx(float((predicted == labels).double().mean()))
    assert value("sensitivity", counts) == pytest.approx(recalls[1] if binary else recalls.mean())
    assert value("specificity", counts) == pytest.approx(others[1] if binary else np.mean(others))


@pytest.mark.parametrize(("outputs", "classes", "scale"), CASES)
def test_ece_is_exact(outputs, classes, scale) -> None:
    logits, labels = drawn(outputs, classes, scale)
    confidence, predicted = logits.softmax(1).max(1)
    edges = np.linspace(0, 1, 16)
    bins = np.clip(np.digitize(confidence, edges) - 1, 0, 14)
    correct = (predicted == labels).numpy()
    gaps = [
        np.mean(bins == b) * abs(correct[bins == b].mean() - confidence.numpy()[bins == b].mean())
        for b in range(15)
        if (bins == b).any()
    ]
    assert value("ece", counted(logits, labels, classes)) == pytest.approx(sum(gaps), abs=1e-9)


def test_outputs_of_one_class_are_added() -> None:
    """A growing head has an output per task; the class's probability is their sum."""
    logits = torch.tensor([[1.0, 0.0, 0.5, 2.0], [0.0, 3.0, -1.0, 0.0]])
    labels = torch.tensor([1, 0])
    rows = score_rows(logits, labels, torch.tensor([0, 1, 0, 1]), (0, 1), 2)
    p = logits.double().softmax(1)
    expected = (p[:, 1] + p[:, 3]).logit()
    assert torch.allclose(rows.log_odds[:, 1], expected)
    assert torch.allclose(rows.confidence, expected.sigmoid())


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    logits, labels = drawn(5, (0, 1, 2), 2.0)
    whole = counted(logits, labels, (0, 1, 2)).sums
    halves = (slice(9), slice(9, None))
    parts = [counted(logits[half], labels[half], (0, 1, 2)).sums for half in halves]
    for name in CLASS_COUNTS:
        assert torch.allclose(parts[0][name] + parts[1][name], whole[name])
        assert is_possible(name, whole[name], 3, len(labels))
        assert not is_possible(name, whole[name], 3, len(labels) / 4)
        assert not is_possible(name, whole[name].float(), 3, len(labels))
        assert not is_possible(name, -whole[name], 3, len(labels))
        assert not is_possible(name, whole[name] * float("nan"), 3, len(labels))
        assert not is_possible(name, whole[name][:1], 3, len(labels))


def predicted_numbers(rows: int = 200, mean: float = 1e4, std: float = 30.0):
    """Return targets and predictions in their unit, and their errors, counted standardized."""
    draw = np.random.default_rng(rows)
    y = draw.normal(mean, std, rows)
    predicted = y + draw.normal(2.0, 10.0, rows)
    scaled = [torch.tensor((values - mean) / std) for values in (predicted, y)]
    return y, predicted, count_numbers(*scaled, 1.0, std)


def test_errors_of_numbers_are_exact_in_their_unit() -> None:
    y, predicted, sums = predicted_numbers()
    counts = ScoreCounts((0,), False, sums)
    assert value("mae", counts) == pytest.approx(mean_absolute_error(y, predicted))
    assert value("r2", counts) == pytest.approx(r2_score(y, predicted))
    assert counts.accuracy == value("r2", counts)


@pytest.mark.parametrize("predicted", [[2.0, 2.0], [1.0, 2.0]])
def test_r2_of_equal_targets_is_that_of_scikit_learn(predicted) -> None:
    sums = count_numbers(torch.tensor(predicted), torch.tensor([2.0, 2.0]), 1.0, 1.0)
    assert value("r2", ScoreCounts((0,), False, sums)) == r2_score([2.0, 2.0], predicted)


def test_errors_of_parts_add_up_and_are_checked() -> None:
    _, _, sums = predicted_numbers()
    errors = sums["errors"]
    assert is_possible("errors", errors, 1, 200)
    assert is_possible("errors", errors * torch.tensor([1, 1, 1, -1, 1]), 1, 200)
    assert not is_possible("errors", errors, 1, 199)
    for place in range(5):
        for change in (float("nan"), -1.0 if place != 3 else 1e9):
            changed = errors.clone()
            changed[place] *= change
            assert not is_possible("errors", changed, 1, 200)


def test_metrics_are_those_of_the_target() -> None:
    assert list(make_metrics(None, "number")) == ["r2", "mae"]
    assert make_metrics(None) == make_metrics(["accuracy"]) == {}
    assert list(make_metrics(["worst_client"], "number")) == ["worst_client"]
    with pytest.raises(
        UserError, match=r"must be worst_client, r2, mae with data\.target 'number'"
    ):
        make_metrics(["accuracy"], "number")
    with pytest.raises(UserError, match=r"must be accuracy, .* with data\.target 'class', .*'mae'"):
        make_metrics(["mae"])


def test_what_is_not_defined_is_none() -> None:
    logits, labels = drawn(2, (0, 1), 1.0)
    one_class = counted(logits[labels == 0], labels[labels == 0], (0, 1))
    assert value("auroc", one_class) is None
    assert value("sensitivity", one_class) is None
    assert value("specificity", one_class) > 0
    assert value("worst_client", one_class) is None


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"evaluate\.metrics: must be accuracy, macro_f1, .*'bleu'"):
        make_metrics(["accuracy", "bleu"])
    with pytest.raises(UserError, match=r"a subclass of perdure\.Metric"):
        make_metrics(["pathlib.Path"])


def test_the_metric_of_the_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    section = text.partition("## Add a metric")[2].partition("\n## ")[0]
    file, line = re.findall(r"```python\n(.*?)```", section, re.S)
    name, path = re.fullmatch(r'"(\w+)": "perdure\.evaluation\.metrics\.(.*)",\n', line).groups()
    (tmp_path / f"{name}.py").write_text(file, encoding="utf-8")
    monkeypatch.setitem(METRICS.builtin, name, f"{name}.{path}")
    metric = make_metrics([name], folder=tmp_path)[name]
    sys.modules.pop(name)
    logits, labels = drawn(5, (0, 1, 2), 2.0)
    recall = recall_score(labels, logits.argmax(1), labels=(0, 1, 2), average="macro")
    assert metric.value(counted(logits, labels, (0, 1, 2))) == pytest.approx(1 - recall)
