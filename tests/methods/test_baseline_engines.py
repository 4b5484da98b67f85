"""EWC, ER, LwF and FLwF-2T train alike on both engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baseline_runs import TINY, final_models


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "ewc", "samples": 20},
        {"kind": "ewc", "lambda": 1.0, "step": "gradient", "samples": 20},
        {"kind": "er", "budget": 20, "replay_batch": 4},
        {"kind": "lwf"},
        {"kind": "flwf-2t"},
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {"stream": {"kind": "split", "tasks": 2}, "model": {"hidden": [8], "head": "growing"}},
        {
            "stream": {"kind": "split", "tasks": 2, "presence": 0.5},
            "clients": TINY["clients"] | {"count": 8, "per_round": 8},
            "model": {"hidden": [8], "dropout": 0.2},
            "train": TINY["train"] | {"outputs": "seen"},
        },
    ],
    ids=["growing", "presence"],
)
def test_engines_agree(
    method: dict[str, Any], more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    train = {**more.get("train", TINY["train"]), "rounds": 1, "max_steps": 3}
    one, two = final_models(method, **{**more, "train": train})
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=1e-5, msg=name)
    assert "cannot be stacked" not in caplog.text


@pytest.mark.parametrize("method", [{"kind": "ewc", "samples": 8}, {"kind": "lwf"}], ids=str)
def test_convolutions_too_on_both_engines(
    method: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    few = {
        "data": {"limit": 60, "test_limit": 40},
        "stream": {"kind": "split", "tasks": 2},
        "model": {"kind": "conv", "width": 4},
        "train": {"rounds": 1, "lr": 0.1, "max_steps": 2},
    }
    one, two = final_models(method, **few)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=1e-5, msg=name)
    assert "cannot be stacked" not in caplog.text
