"""What the matrices of runs hold: accuracy, or R2 of predicted numbers."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.report.figure_data import Axis
from perdure.report.run_records import Runs
from perdure.training.metrics import DEFINITIONS


@dataclass(frozen=True)
class Quantity:
    """The quantity of the matrices, with its axes."""

    name: str
    """Its name in sentences."""
    about: str
    """A sentence on its values."""
    axis: Axis
    """The axis of its values."""
    forgetting: Axis
    """The axis of its differences."""

    @property
    def title(self) -> str:
        """The name at the beginning of a title."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def definitions(self) -> dict[str, str]:
        """The definitions of the metrics, which are those of this quantity."""
        return {name: self.worded(meaning) for name, meaning in DEFINITIONS.items()}

    def mode_meaning(self, meaning: str) -> str:
        """Return the meaning of an inference mode; numbers are not predicted among classes."""
        return meaning.partition(";")[0] if self.name == "R2" else meaning

    def worded(self, text: str) -> str:
        """Return a sentence about accuracy as one about this quantity."""
        return text.replace("accuracy", self.name)


ACCURACY = Quantity(
    "accuracy",
    "Accuracies are fractions from 0 to 1.",
    Axis("accuracy (fraction from 0 to 1)", limits=(0.0, 1.0), min_span=0.1),
    Axis(
        "forgetting (difference of accuracies)", include_zero=True, limits=(-1.0, 1.0), min_span=0.1
    ),
)
R2 = Quantity(
    "R2",
    "ACC and the other metrics of the tables are those of R2: 1 is perfect, 0 is as good as always "
    "predicting the mean.",
    Axis("R2 (1 is perfect, 0 always the mean)", min_span=0.1),
    Axis("forgetting (difference of R2)", include_zero=True, min_span=0.1),
)


def quantity_of(runs: Runs) -> Quantity:
    """Return what the matrices of runs hold; the first run decides."""
    is_number = runs.records[0].result["measure"] == "r2"
    return R2 if is_number else ACCURACY
