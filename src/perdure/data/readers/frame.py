"""Frames of pandas, read like a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perdure.config import CustomData
from perdure.core.errors import UserError
from perdure.data.readers.table import table_rows
from perdure.data.readers.table_columns import checked_columns, number_column, shortened
from perdure.data.readers.text import text_columns
from perdure.data.rows import Rows
from perdure.data.source import Array, ConfigLocation


@dataclass(frozen=True)
class FrameColumns:
    """The columns of a pandas DataFrame."""

    frame: Any

    def names(self) -> list[str]:
        """Return the names of the columns."""
        names = [str(name) for name in self.frame.columns]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"two columns are called {repeated!r}")
        return names

    def read(self, numbers: Sequence[str], words: Sequence[str]) -> tuple[Array, list[list[str]]]:
        """Return columns of numbers, float64 [rows, numbers], and columns of strings.

        Raises:
            ValueError: There are no rows, or a value is missing or no number.
        """
        columns = {str(name): self.frame[name] for name in self.frame.columns}
        strings = [_strings(columns[name]) for name in words]
        values = [number_column(columns[name], name) for name in numbers]
        table = np.stack(values, 1) if values else np.empty((len(self.frame), 0))
        return checked_columns(table, strings, numbers, words)


def frame_rows(frame: Any, config: CustomData, location: ConfigLocation) -> Rows:
    """Return the rows of a frame: texts if it has the text columns, else numbers."""
    columns = FrameColumns(frame)
    names, texts = columns.names(), text_columns(config.text_column)
    is_text = config.feature_columns is None and all(name in names for name in texts)
    return table_rows(columns, config, location, texts if is_text else ())


def frame_features(frame: Any, names: Sequence[str]) -> Array:
    """Return columns of a frame as features: float32 [rows, names].

    Raises:
        UserError: A column is missing, or a value is missing or no number.
    """
    columns = FrameColumns(frame)
    missing = next((name for name in names if name not in columns.names()), None)
    if missing is not None:
        raise UserError(
            f"input: must have the column {missing!r}, got {shortened(columns.names())}"
        )
    try:
        return columns.read(names, [])[0].astype(np.float32)
    except ValueError as error:
        raise UserError(f"input: must be valid features ({error}), got DataFrame") from None


def _strings(column: Any) -> list[str]:
    """Return a column as strings, with "" for missing values."""
    missing = column.isna().tolist()
    return ["" if gap else str(v) for v, gap in zip(column.tolist(), missing, strict=True)]
