"""The `runs` section of a config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from perdure.config.base import ConfigSection
from perdure.config.types import NOT_BOOL, NonNegativeInt, PositiveInt


class RunsConfig(ConfigSection):
    """What a run keeps on disk.

    Example: `runs: {checkpoint_every: 10, evaluate_every: 5}`
    """

    checkpoint_every: PositiveInt = 1
    """Rounds between checkpoints; the end of a task always has one."""
    keep_checkpoints: Annotated[int, Field(ge=2), NOT_BOOL] = 2
    """Number of checkpoints kept."""
    keep_tasks: NonNegativeInt = 3
    """Number of finished tasks, the last ones, whose checkpoints are kept for `perdure rewind`."""
    evaluate_every: PositiveInt | None = None
    """Rounds between evaluations on the current task. If None, only at the end of a task."""
    evaluate_all: bool = False
    """Evaluate on all tasks so far, not only on the current one, every `evaluate_every` rounds. The
    report then shows accuracy by round."""
    report: bool = True
    """Write report.html into the run directory at the end."""
    tensorboard: bool = False
    """Write metrics for TensorBoard into the run directory."""
    mlflow: bool | str = False
    """Log to MLflow: true for its default place (MLFLOW_TRACKING_URI), or a tracking URI."""

    @model_validator(mode="after")
    def _evaluated_at_times(self) -> RunsConfig:
        if self.evaluate_all and self.evaluate_every is None:
            raise ValueError("evaluate_every: must be a number with runs.evaluate_all, got None")
        return self
