"""TensorBoard: metric values in the folder tensorboard/ of the run directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from perdure.core.registry import require


def check_tensorboard() -> None:
    """Refuse `runs.tensorboard` if the extra is not installed."""
    _writer_class()


class TensorBoardTracker:
    """Writes event files of TensorBoard.

    A resumed run deletes the files and writes all values again, since such files cannot be
    shortened.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tensorboard"
        shutil.rmtree(path, ignore_errors=True)
        self._writer = _writer_class()(log_dir=str(path), flush_secs=10)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write one scalar per value."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self, outcome: str) -> None:
        """Flush and close the files."""
        self._writer.close()


def _writer_class() -> Any:
    return require("torch.utils.tensorboard", "runs.tensorboard", "tensorboard").SummaryWriter
