"""perdure check --dry-run: both engines, two tasks, one round."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.cli.main import main
from perdure.config import parse
from perdure.contract import Exchange, Method, Scalar, Train
from perdure.core.errors import UserError
from perdure.runs.trial import dry_run

VALUES: dict[str, Any] = {
    "data": {"limit": 50},
    "clients": {"count": 6, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [6]},
    "train": {"rounds": 30, "batch_size": 16},
}


@dataclass(frozen=True)
class CountsPadding(Method):
    """Averages over all rows itself, padding included: wrong on the vector engine alone."""

    def exchanges(self, context: Any) -> list[Exchange | Train]:
        return [Train(loss=self.loss)]

    def loss(self, step: Any) -> Scalar:
        return Scalar(step.cross_entropy(step.logits()).mean())


@dataclass(frozen=True)
class CannotStack(Method):
    """Looks at a value, which a stack of clients does not have."""

    def exchanges(self, context: Any) -> list[Exchange | Train]:
        return [Train(loss=self.loss)]

    def loss(self, step: Any) -> torch.Tensor:
        losses: torch.Tensor = step.cross_entropy(step.logits())
        return losses if float(losses.sum().detach()) > 0 else losses * 2


@pytest.mark.parametrize("kind", ["fedavg", "er", "fot", "scaffold"])
def test_engines_agree_on_built_in_methods(kind: str) -> None:
    trial = dry_run(parse({**VALUES, "method": {"kind": kind}}))
    assert trial.tasks == 2
    assert trial.stacked
    assert trial.agrees


def test_a_loss_that_counts_padding_is_found() -> None:
    trial = dry_run(parse({**VALUES, "method": {"kind": f"{__name__}.CountsPadding"}}))
    assert not trial.agrees
    assert trial.difference > 1e-3


def test_clients_that_cannot_be_stacked_are_reported() -> None:
    trial = dry_run(parse({**VALUES, "method": {"kind": f"{__name__}.CannotStack"}}))
    assert trial.agrees
    assert not trial.stacked


def test_a_config_whose_data_is_on_nodes_is_refused() -> None:
    federation = {"classes": ["a", "b"], "shape": [1, 8, 8]}
    values = {"federation": federation, "stream": {"kind": "domains"}}
    with pytest.raises(UserError, match="--dry-run: must be a config without"):
        dry_run(parse(values))


def test_the_command_prints_the_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("data: {limit: 50}\nclients: {count: 3}\n")
    assert main(["check", "--dry-run", "good.yaml"]) == 0
    assert "2 tasks of one round; serial and vector agree" in capsys.readouterr().out
    partition = "{kind: dirichlet, alpha: 0.5}"
    (tmp_path / "bad.yaml").write_text(
        f"data: {{limit: 50}}\nclients: {{count: 6, partition: {partition}}}\n"
        f"method: {{kind: {__name__}.CountsPadding}}\n"
    )
    assert main(["check", "--dry-run", "bad.yaml"]) == 1
    assert "serial and vector differ by" in capsys.readouterr().err.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "good.yaml"]
