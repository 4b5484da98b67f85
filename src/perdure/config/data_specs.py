"""Data that a command line names: a file, a folder, or a YAML file with one section or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.core.errors import UserError
from perdure.core.spelling import argument
from perdure.core.yaml_text import read_yaml_value

_SOURCES = {
    ".npz": "npz",
    ".csv": "table",
    ".csv.gz": "table",
    ".parquet": "table",
    ".jsonl": "text",
    ".jsonl.gz": "text",
}
"""The source that reads a file, by the end of its name."""
_SECTION = "a mapping with `source`, or a list of them"


def read_data_spec(spec: str | Path) -> list[dict[str, Any]]:
    """Return the sections of `data` that a path stands for, one per task.

    Args:
        spec: A file or a folder of examples; or a YAML file with a section like `data`, a list of
            them, or `data:` with either.

    Raises:
        UserError: There is no such path, or nothing reads it.
    """
    path = Path(spec)
    if not path.exists():
        raise UserError(
            f"{argument('data')}: must be a file or a folder, got {str(spec)!r}, which is not there"
        )
    if path.suffix in (".yaml", ".yml"):
        return _sections(path)
    if path.is_dir():
        return [{"source": "folder", "path": str(path.resolve())}]
    source = next((s for end, s in _SOURCES.items() if path.name.endswith(end)), None)
    if source is None:
        expected = f"a folder, a YAML file or one of {', '.join(_SOURCES)}"
        raise UserError(f"{argument('data')}: must be {expected}, got {str(spec)!r}")
    return [{"source": source, "path": str(path.resolve())}]


def _sections(path: Path) -> list[dict[str, Any]]:
    value = read_yaml_value(path)
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    sections = value if isinstance(value, list) else [value]
    if not sections or not all(isinstance(each, dict) and "source" in each for each in sections):
        raise UserError(f"{path}: must be {_SECTION}")
    return sections
