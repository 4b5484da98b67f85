"""FedLDA: linear discriminant analysis of frozen features, from sums.

Classes are Gaussians of one covariance S, the pooled covariance within classes:
    logit_c = f^T S^-1 mean_c - mean_c^T S^-1 mean_c / 2 + log(n_c / n)
S is shrunk towards a multiple of the identity. As a federated reference: the sums of Legate et al.,
NeurIPS 2023, with the Gram matrix beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.algebra.class_statistics import (
    LinearHead,
    class_means,
    discriminant_head,
    shrink,
    within_scatter,
)
from perdure.config.section import Search
from perdure.methods.parts.closed_form import ClassSums, ClosedForm


@dataclass(frozen=True)
class FedLDA(ClosedForm):
    """Linear discriminant analysis: a reference that needs one exchange per task, no training.

    A client sends, as sums, the count and the total of each class's features and their Gram matrix.
    """

    shrinkage: Annotated[float, Field(ge=0, le=1), Search(0.01, 0.5, log=True)] = 0.1
    """Fraction by which the shared covariance moves towards a multiple of the identity."""

    kind: ClassVar[str] = "fedlda"
    title: ClassVar[str] = "FedLDA"
    family: ClassVar[str] = "References"
    idea: ClassVar[str] = "Linear discriminant analysis: Gaussian classes, one shared covariance."
    paper: ClassVar[str] = "Fisher, 1936; as sums over clients"

    def head(self, sums: ClassSums) -> LinearHead:
        """Return the discriminant head of the classes seen so far."""
        assert sums.count is not None
        assert sums.total is not None
        assert sums.gram is not None
        covariance = within_scatter(sums.count, sums.total, sums.gram) / sums.count.sum()
        means = class_means(sums.count, sums.total)
        return discriminant_head(sums.count, means, shrink(covariance, self.shrinkage))
