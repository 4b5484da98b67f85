"""The `runs` section of a config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
    report: bool = True
    """Write report.html into the run directory at the end."""
    tensorboard: bool = False
    """Write metrics for TensorBoard into the run directory."""
    mlflow: bool | str = False
    """Log to MLflow: true for its default place (MLFLOW_TRACKING_URI), or a tracking URI."""
