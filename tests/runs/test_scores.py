"""`evaluate.metrics` from a config to result.json, tables and the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sklearn.metrics import f1_score

import perdure
from perdure.cli.main import main
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.event_log import Event
from perdure.deploy.custom_code import check_trust
from perdure.evaluation.forgetting import LEVELS, metrics
from perdure.evaluation.metrics import METRICS, definition, make_metrics
from perdure.training.events import evaluators_of
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream

VALUES: dict[str, Any] = {
    "data": {"limit": 300, "test_limit": 150},
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 3},
    "model": {"hidden": [16]},
    "train": {"rounds": 2, "max_steps": 4, "lr": 0.2},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}
ALL = ["accuracy", "macro_f1", "auroc", "sensitivity", "specificity", "ece", "worst_client"]


def with_metrics(metrics: list[Any], **changes: Any) -> dict[str, Any]:
    return {**VALUES, "evaluate": {"metrics": metrics}, **changes}


def test_accuracy_alone_changes_nothing() -> None:
    plain, asked = perdure.run(VALUES).values, perdure.run(with_metrics(ALL)).values
    assert plain["scores"] is None
    assert plain["client_scores"] is None
    same = ("matrix", "metrics", "forgetting", "model_sha256")
    assert [plain[key] for key in same] == [asked[key] for key in same]
    assert list(asked["scores"]) == ALL
    assert asked["scores"]["accuracy"] == asked["matrix"]


def test_a_score_is_that_of_the_model_on_the_task() -> None:
    experiment = build_experiment(parse(with_metrics(["macro_f1"])))
    state = run_stream(experiment, experiment.initial_state(), lambda state, event: None)
    state.task = 1
    (evaluator,) = evaluators_of(experiment, state)
    for number in range(2):
        task = experiment.task(number)
        (group,) = task.groups
        x, labels = task.test.gather(group.index), task.test.y[group.index]
        logits = experiment.method.predict(state.server, x, evaluator.network, None, None)
        predicted = evaluator.network.outputs.output_labels(1)[logits.argmax(1)]
        expected = f1_score(labels, predicted, labels=task.classes, average="macro")
        assert state.scores["macro_f1"]["task_agnostic"][1][number] == pytest.approx(expected)
    assert state.scores["macro_f1"]["task_agnostic"][0][1] is None


def test_a_run_resumes_with_its_scores(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(state: Any, event: Event) -> None:
        if event["event"] == "round" and event["task"] == 1:
            raise Stop

    config = with_metrics(["auroc", "ece"])
    whole = perdure.run(config).values
    with pytest.raises(Stop):
        perdure.run(config, out=tmp_path / "run", watch=stop)
    resumed = perdure.run(config, out=tmp_path / "run", resume=True).values
    assert resumed["scores"] == whole["scores"]


MINE = '''
from perdure import Metric


class Mine(Metric):
    """Mine."""

    def value(self, counts):
        return float(counts.confusion[0, 0] / counts.confusion.sum())
'''


def test_a_custom_metric_is_copied_and_asks_for_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_metric.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = with_metrics(["own_metric.Mine"])
    values = perdure.run(config, out=tmp_path / "run").values
    assert 0 < values["scores"]["own_metric.Mine"]["task_aware"][1][0] < 1
    assert (tmp_path / "run" / "method" / "own_metric.py").is_file()
    sys.modules.pop("own_metric")
    with pytest.raises(UserError, match=r"own_metric\.Mine"):
        check_trust(parse(config), tmp_path / "run", trust=False, stream=True)


def test_a_run_is_resumed_with_the_copy_of_its_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def stop(state: Any, event: Event) -> None:
        if event["event"] == "round" and event["task"] == 1:
            raise Stop

    (tmp_path / "own_metric.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    config = with_metrics(["own_metric.Mine"])
    whole = perdure.run(config).values
    with pytest.raises(Stop):
        perdure.run(config, out=tmp_path / "run", watch=stop)
    (tmp_path / "own_metric.py").unlink()
    sys.modules.pop("own_metric")
    with pytest.raises(UserError, match=r"own_metric\.Mine"):
        perdure.resume(tmp_path / "run")
    resumed = perdure.resume(tmp_path / "run", trust=True).values
    sys.modules.pop("own_metric")
    assert resumed["scores"] == whole["scores"]
    assert resumed["score_definitions"] == {"own_metric.Mine": "mine"}


def test_an_installed_package_adds_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "some_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: some_package\nVersion: 1.0\n", encoding="utf-8")
    points = "[perdure.metrics]\nmine = some_package:Mine\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    (tmp_path / "some_package.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert METRICS.is_installed("mine")
    metrics = make_metrics(["accuracy", "mine"])
    sys.modules.pop("some_package")
    assert definition(metrics["mine"]) == "mine"


def test_forgetting_of_an_error_is_positive_if_it_grew() -> None:
    error, accuracy = [[0.1, None], [0.4, 0.2]], [[0.9, None], [0.6, 0.8]]
    of_error, of_accuracy = metrics(error, lower_is_better=True), metrics(accuracy)
    for name in set(of_error) - set(LEVELS):
        assert of_error[name] == pytest.approx(of_accuracy[name])
    assert of_error["FGT"] == pytest.approx(0.3)
    for name in LEVELS:
        assert of_error[name] == pytest.approx(1 - of_accuracy[name])
    values = perdure.run(with_metrics(["accuracy", "ece"])).values
    assert values["score_metrics"]["accuracy"] == values["metrics"]
    ece = values["scores"]["ece"]["task_aware"]
    assert values["score_metrics"]["ece"]["task_aware"]["FGT"] == ece[1][0] - ece[0][0]


@pytest.mark.slow
def test_metrics_are_printed_compared_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("c.yaml").write_text(json.dumps(with_metrics(["macro_f1", "auroc"])), encoding="utf-8")
    assert main(["run", "c.yaml", "--out", "one", "--quiet"]) == 0
    assert " auroc 0." in capsys.readouterr().out
    words = ["--methods", "fedavg,fedprox", "--seeds", "100", "--references", "none", "--jobs", "1"]
    assert main(["compare", "c.yaml", *words, "--out", "both", "--quiet"]) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if "ACC" in line)
    assert {"macro_f1", "auroc"} <= set(header.split())
    assert main(["report", "both", "--html", "page.html"]) == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "auroc on each task after each task" in page


def test_names_must_differ() -> None:
    with pytest.raises(UserError, match=r"evaluate\.metrics: must be names that differ"):
        parse(with_metrics(["auroc", "auroc"]))


def test_unknown_names_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluate\.metrics: must be .*got 'bleu'"):
        perdure.run(with_metrics(["bleu"]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
