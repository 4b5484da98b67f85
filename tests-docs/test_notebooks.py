"""The notebooks of examples/ run from their first to their last cell, in a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def executed(notebook: Path, folder: Path) -> Any:
    content = nbformat.read(notebook, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=600, kernel_name="python3", resources=resources).execute()
    return content


def outputs(content: Any, kind: str) -> list[str]:
    cells = (cell for cell in content.cells if cell.cell_type == "code")
    data = (output.get("data", {}) for cell in cells for output in cell.outputs)
    return [each[kind] for each in data if kind in each]


def test_there_are_three_without_outputs() -> None:
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        content = nbformat.read(notebook, as_version=4)
        nbformat.validate(content)
        assert not any(cell.get("outputs") for cell in content.cells), notebook.name


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    content = executed(notebook, tmp_path)
    shown = outputs(content, "text/html")
    assert any(text.startswith("<progress value=") for text in shown), "no progress bar"
    assert any("<table" in text for text in shown), "no table"
    if notebook.stem == "first-run":
        assert len(outputs(content, "image/png")) == 2
    if notebook.stem == "extend-and-compare":
        assert len(outputs(content, "image/png")) == 1
        assert "\\textbf{" in (tmp_path / "runs/sweep/table-task_agnostic.tex").read_text()
        assert list((tmp_path / "figures").glob("sweep-train-lr-*.pdf"))
