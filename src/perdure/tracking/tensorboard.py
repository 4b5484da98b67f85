"""TensorBoard: points in the run directory's folder tensorboard/."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from perdure.core.optional import require


def check_tensorboard() -> None:
    """Refuse where the extra is missing."""
    _writer_class()


class TensorBoardTracker:
    """Writes anew what a resumed run had written: event files cannot be cut, only left behind."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tensorboard"
        shutil.rmtree(path, ignore_errors=True)
        self._writer = _writer_class()(log_dir=str(path), flush_secs=10)

    def write(self, step: int, values: dict[str, float]) -> None:
        """A scalar for each value."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self, outcome: str) -> None:
        """Flush."""
        self._writer.close()


def _writer_class() -> Any:
    return require("torch.utils.tensorboard", "runs.tensorboard", "tensorboard").SummaryWriter
