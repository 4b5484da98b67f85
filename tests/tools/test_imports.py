"""What tools, examples and tests outside of tests/ import from the package is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "tools",
    "examples",
    "benchmarks",
    "claims",
    "tests-docs",
    "tests-federation",
    "tests-models",
)
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported(source: str) -> Iterator[tuple[str, str | None]]:
    """Yield the modules of perdure that a file imports, with the name that it wants of each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("perdure."):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from ((name, None) for name in names if f"{name}.".startswith("perdure."))


def file_of(module: str) -> Path | None:
    """Return the file of a module."""
    path = ROOT / "src" / Path(*module.split("."))
    found = [place for place in (path.with_suffix(".py"), path / "__init__.py") if place.is_file()]
    return found[0] if found else None


def names_in(path: Path) -> set[str]:
    """Return the names that a file defines, imports or writes as text (names that load late)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name)
            case ast.Constant(value=str(text)):
                found |= set(text.split())
    return found


def missing(source: str) -> list[str]:
    """Return the imports of a file that lead nowhere."""
    found = []
    for module, name in imported(source):
        path = file_of(module)
        there = path is not None and (
            name is None or name in names_in(path) or file_of(f"{module}.{name}") is not None
        )
        found += [] if there else [f"{module}: {name}"]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_lead_somewhere(path: Path) -> None:
    assert missing(path.read_text(encoding="utf-8")) == []


def test_an_import_that_leads_nowhere_is_found() -> None:
    source = "from perdure.nowhere import x\nimport perdure.no\n"
    assert missing(source) == ["perdure.nowhere: x", "perdure.no: None"]
    source = "from perdure.core.rng import no_such_name"
    assert missing(source) == ["perdure.core.rng: no_such_name"]
    assert missing("from perdure.core.rng import Rng\nfrom perdure import run, core\n") == []
