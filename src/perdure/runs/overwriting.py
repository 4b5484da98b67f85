"""Delete the run in a directory, so that another can take its place. Other files stay."""

from __future__ import annotations

import shutil
from pathlib import Path

from perdure.config import load_saved
from perdure.core.errors import UserError
from perdure.core.spelling import argument

_CONTENT = (
    "result.json", "report.html", "model", "checkpoints", "clients", "events.jsonl", "sums.jsonl",
    "draws.txt", "tensorboard", "mlflow.json", "method", "config.yaml",
)  # fmt: skip
"""What a run consists of, in the order of deletion: without its config it would be no run."""


def check_overwritable(path: Path) -> None:
    """Refuse to delete what may not be a run: the whole of a run has a config and a lock.

    Raises:
        UserError: The directory is a link, holds a federation, or was not written by a run.
    """
    reason = _reason(path)
    if reason is not None:
        option = argument("overwrite", True)
        raise UserError(f"{option}: must be given for a run directory, got {path}, {reason}")


def _reason(path: Path) -> str | None:
    if path.is_symlink():
        return "which is a link"
    if (path / "federation").exists():
        return "which holds a federation"
    for name in ("config.yaml", ".lock"):
        if (path / name).is_symlink() or not (path / name).is_file():
            return f"whose {name} is not a file of a run"
    try:
        load_saved(path / "config.yaml")
    except UserError:
        return "whose config.yaml is not that of a run"
    return None


def delete_run(path: Path) -> None:
    """Delete the run in a directory, whose lock this process holds; links are not followed."""
    for name in _CONTENT:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
