"""The checkpoints that a run directory keeps."""

from __future__ import annotations

from pathlib import Path

from perdure.runs import checkpoint
from perdure.runs.checkpoint import CheckpointFiles


def numbers(folder: Path) -> list[int]:
    return [checkpoint.number_of(path) for path in checkpoint.paths(folder)]


def test_cleaning_keeps_the_checkpoint_that_a_run_goes_on_from(tmp_path: Path) -> None:
    """Damaged newer ones do not count among those that are kept."""
    state = {"state": {"task": 0, "round": 1}, "clients": {}}
    written = [checkpoint.save(tmp_path, number, state) for number in range(6)]
    for path in written[4:]:
        path.write_bytes(b"damaged")
    found = checkpoint.latest(tmp_path)
    assert found is not None
    CheckpointFiles(tmp_path, keep=2).clean(*found)
    assert numbers(tmp_path) == [5, 4, 3, 2]
