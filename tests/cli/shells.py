"""Commands as a test runs them, and what they say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.cli.main import main

TINY: dict[str, Any] = {
    "data": {"source": "digits", "limit": 120},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 2},
    "engine": {"kind": "serial"},
}


@dataclass(frozen=True)
class Said:
    """What a command left: its exit code and its words."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Shell:
    """Runs commands in a folder and sees what they write there."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *words: str | Path) -> Said:
        self.capture.readouterr()
        code = main([str(word) for word in words])
        return Said(code, *self.capture.readouterr())

    def config(self, changes: dict[str, Any] | None = None, name: str = "tiny.yaml") -> Path:
        values = {**TINY, **(changes or {})}
        (self.folder / name).write_text(yaml.safe_dump(values))
        return Path(name)

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}


def one_sentence(said: Said, *parts: str) -> None:
    """A mistake: exit code 2 and one sentence that names the parts."""
    lines = [line for line in said.err.splitlines() if "INFO" not in line]
    assert said.code == 2, said
    assert len(lines) == 1, said.err
    assert lines[0].startswith("perdure: error: ")
    for part in parts:
        assert part in lines[0]
