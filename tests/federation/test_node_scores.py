"""Metrics where nodes evaluate: they send sums, which are checked and added."""

from __future__ import annotations

import pytest
import torch
from in_process import in_process_engine
from test_own_data import CONFIG as OWN_DATA
from test_own_data import data

from perdure.evaluation.evaluator import MODES
from perdure.federation.evaluation_counts import NeededCounts, read_counts
from perdure.federation.messages import BadMessage, pack, unpack
from perdure.runs.run import run

__all__ = ["data"]
CONFIG = {**OWN_DATA, "model": {"kind": "mlp", "hidden": [16], "head": "shared"}}
METRICS = {**CONFIG, "evaluate": {"metrics": ["accuracy", "auroc", "ece", "worst_client"]}}


def test_scores_are_those_of_all_nodes_together(tmp_path, data):
    engine, transport = in_process_engine(METRICS, tmp_path, data)
    values = run(METRICS, engine=engine).values
    assert values["scores"]["accuracy"] == values["matrix"]
    assert 0.5 < values["scores"]["auroc"]["task_aware"][1][1] < 1
    for j in range(2):
        sizes = [len(transport.node(node).experiment.task(j).test.y) for node in range(2)]
        by_node = [values["client_scores"][j][str(node)]["accuracy"] for node in range(2)]
        for mode in ("task_agnostic", "task_aware"):
            accuracies = [scores[mode] for scores in by_node]
            mean = sum(a * n for a, n in zip(accuracies, sizes, strict=True)) / sum(sizes)
            assert values["matrix"][mode][1][j] == pytest.approx(mean)
            assert values["scores"]["worst_client"][mode][1][j] == min(accuracies)
    plain, _ = in_process_engine(CONFIG, tmp_path / "plain", data)
    assert run(CONFIG, engine=plain).values["model_sha256"] == values["model_sha256"]


def missing(sums):
    del sums["task_aware"]


def negative(sums):
    sums["task_aware"]["histograms"] -= 1


def too_many(sums):
    sums["task_aware"]["confusion"] += 1e6


def misshapen(sums):
    sums["task_aware"]["confusion"] = torch.zeros(3, 3, dtype=torch.float64)


def of_text(sums):
    sums["task_aware"]["calibration"] = "many"


@pytest.mark.parametrize("change", [missing, negative, too_many, misshapen, of_text])
def test_impossible_counts_are_left_out(tmp_path, data, change):
    engine, transport = in_process_engine(METRICS, tmp_path, data)

    def spoil(node, request, reply):
        if request.kind != "evaluate" or node == 0:
            return reply
        tree = unpack(reply)
        change(tree["counts"][0]["sums"])
        return pack(tree)

    transport.spoil = spoil
    values = run(METRICS, engine=engine).values
    assert list(values["client_scores"][0]) == ["0"]


@pytest.mark.parametrize("total", [10**400, float("nan"), float("inf"), "many", None])
def test_totals_that_are_no_counts_are_refused(total):
    tree = {
        "correct": dict.fromkeys(MODES, 0.0),
        "total": total,
        "predicted_tasks": None,
        "sums": {},
        "task": 0,
    }
    with pytest.raises(BadMessage, match="evaluation counts"):
        read_counts(tree, 0, 0, NeededCounts())
