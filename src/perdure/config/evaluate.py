"""The `evaluate` section of a config."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from perdure.config.base import ConfigSection
from perdure.config.types import Text
from perdure.core.given import dotted_path


def _with_path(value: Any) -> Any:
    return dotted_path(value) if isinstance(value, type) else value


MetricName = Annotated[Text, BeforeValidator(_with_path)]
"""A name or a dotted path; the class in Python."""


class EvaluateConfig(ConfigSection):
    """What is measured on test data.

    Example: `evaluate: {metrics: [accuracy, macro_f1, auroc]}`
    """

    metrics: Annotated[list[MetricName], Field(min_length=1)] | None = None
    """Metrics: accuracy, macro_f1, auroc, sensitivity, specificity, ece, worst_client; of numbers
    r2, mae, worst_client; the names of installed ones, or dotted paths of custom ones. Each has a
    matrix over tasks in result.json (`scores`); that of accuracy, or of r2, is always there
    (`matrix`). Default: accuracy; r2 and mae of numbers (`data.target: number`)."""

    @model_validator(mode="after")
    def _each_once(self) -> EvaluateConfig:
        if self.metrics is not None and len(set(self.metrics)) < len(self.metrics):
            raise ValueError(f"metrics: must be names that differ, got {self.metrics!r}")
        return self
