"""FedNCM: the nearest class mean of frozen features.

Legate et al., Guiding the Last Layer in Federated Learning with Pre-Trained Models, NeurIPS 2023.
    answer = argmin_c |f(x) - mean_c|
with the means over all clients' examples of all tasks so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.algebra.class_statistics import LinearHead, class_means, nearest_mean_head
from perdure.methods.parts.closed_form import ClassSums, ClosedForm


@dataclass(frozen=True)
class FedNCM(ClosedForm):
    """Nearest class mean: a reference that needs one exchange per task and no training.

    A client sends the count and the total of each class's features, as sums. The means are those of
    all examples together, whatever the order of tasks and clients.

    Reference: Legate et al., Guiding the Last Layer in Federated Learning with Pre-Trained Models,
    NeurIPS 2023.
    """

    kind: ClassVar[str] = "fedncm"
    title: ClassVar[str] = "FedNCM"
    family: ClassVar[str] = "References"
    idea: ClassVar[str] = "An example belongs to the class whose mean feature is nearest."
    paper: ClassVar[str] = "Legate et al., NeurIPS 2023"
    needs_gram: ClassVar[bool] = False

    def head(self, sums: ClassSums) -> LinearHead:
        """Return the head that orders classes by the distance to their means."""
        assert sums.count is not None
        assert sums.total is not None
        return nearest_mean_head(class_means(sums.count, sums.total), sums.count)
