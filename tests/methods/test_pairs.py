"""Every pair of methods that docs/combinations.md accepts trains alike on both engines."""

from __future__ import annotations

import sys
from itertools import combinations as pairs
from pathlib import Path
from typing import Any

import pytest

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.methods.registry import KINDS
from perdure.runs.trial import dry_run
from perdure.training.experiment import build_experiment

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from combinations import refusal  # type: ignore[attr-defined]  # noqa: E402

PROMPTS = ("fed-l2p", "fed-dualp", "pip")
SMALL: dict[str, Any] = {
    "data": {"limit": 60, "test_limit": 20},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 2},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "train": {"batch_size": 8, "lr": 0.05},
}
MLP = {"kind": "mlp", "hidden": [6]}
VIT = {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "stamp": {"budget": 2},
    "er": {"budget": 6, "replay_batch": 4},
    "ewc": {"samples": 8},
    "fot": {"sketch_ratio": 1.0},
    "fedprotip": {"max_columns": 16, "max_examples": 16, "space_rank": 2},
    "gpm": {"max_columns": 16, "max_examples": 16},
}
"""Small, to be fast."""


def values(one: str, other: str) -> dict[str, Any]:
    first, second = ({"kind": kind, **OPTIONS.get(kind, {})} for kind in (one, other))
    model = VIT if {one, other} & set(PROMPTS) else MLP
    return {**SMALL, "model": model, "method": {**first, "with": [second]}}


@pytest.mark.parametrize(("one", "other"), list(pairs(KINDS, 2)))
def test_a_pair_agrees_on_both_engines_or_is_refused(one: str, other: str) -> None:
    config = parse(values(one, other))
    if refusal(one, other) is not None:
        with pytest.raises(UserError, match=r"method\.with"):
            build_experiment(config).initial_state()
        return
    trial = dry_run(config)
    assert trial.stacked
    assert trial.difference < 1e-5, trial.parameter
