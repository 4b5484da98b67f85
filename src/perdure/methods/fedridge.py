"""FedRidge: ridge regression on frozen features, from sums.

    min_{W, b} sum |W f + b - onehot(y)|^2 + strength |W|^2
over all clients' examples of all tasks so far. Its solution depends on the Gram matrix and the
class totals alone, which add up over clients and tasks, so that the classifier equals the one that
is fitted on all examples together: the idea of analytic federated continual learning (AFCL, CVPR
2025). A number y to predict takes the place of onehot(y) as (y, 1 - y), of which W f + b has the
first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from perdure.algebra.class_statistics import LinearHead, ridge_head
from perdure.config.section import PositiveFloat, Search
from perdure.methods.parts.closed_form import ClassSums, ClosedForm


@dataclass(frozen=True)
class FedRidge(ClosedForm):
    """Ridge regression: a reference that needs one exchange per task and no training.

    A client sends, as sums, the count and the total of each class's features and their Gram matrix.
    The classifier equals joint ridge regression, whatever the order of tasks and clients.
    """

    strength: Annotated[PositiveFloat, Search(1e-3, 1e3, log=True)] = 1.0
    """Weight of the penalty on the squared weights."""

    kind: ClassVar[str] = "fedridge"
    title: ClassVar[str] = "FedRidge"
    family: ClassVar[str] = "References"
    idea: ClassVar[str] = "Ridge regression onto the classes, as on all examples together."
    paper: ClassVar[str] = "ridge regression as sums; the idea of AFCL, CVPR 2025"
    needs_classes: ClassVar[bool] = False

    def head(self, sums: ClassSums) -> LinearHead:
        """Return the ridge-regression head of the classes seen so far."""
        assert sums.count is not None
        assert sums.total is not None
        assert sums.gram is not None
        return ridge_head(sums.count, sums.total, sums.gram, self.strength)
