"""No test knows a private name of the package: what it checks is what others can see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "perdure"
FOLDERS = ("tests", "tests-docs", "tests-federation", "tests-models", "benchmarks", "claims")


def is_private(name: str) -> bool:
    """Return whether a name is private; `_repr_html_` and its like are a protocol of notebooks."""
    return name.startswith("_") and not name.endswith("_")


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


@cache
def private_names() -> frozenset[str]:
    """Return the private names that the package defines."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py"))
    return frozenset(name for tree in trees for name in defined(tree) if is_private(name))


def known_to(source: str) -> list[str]:
    """Return the private names of the package that a file imports, reads or replaces."""
    tree, found = ast.parse(source), []
    theirs = private_names() - set(defined(tree))
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("perdure"):
                parts = [*module.split("."), *(alias.name for alias in names)]
                found += [name for name in parts if is_private(name)]
            case ast.Attribute(attr=name) if name in theirs:
                found.append(name)
            case ast.Call(args=arguments) if _names_an_attribute(node):
                texts = [a.value for a in arguments if isinstance(a, ast.Constant)]
                words = [word for text in texts for word in str(text).split(".")]
                found += [word for word in words if word in theirs]
    return found


def _names_an_attribute(node: ast.Call) -> bool:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in {"getattr", "setattr", "delattr", "hasattr", "object"}


FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_no_file_outside_of_the_package_knows_its_private_names() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in FILES
        if path != Path(__file__) and (names := known_to(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "from perdure.core.rng import _secret",
        "from perdure._core import x",
        "store._private_name",
        "monkeypatch.setattr(module, '_private_name', 1)",
        "monkeypatch.setattr('perdure.core.module._private_name', 1)",
        "getattr(store, '_private_name')",
    ],
)
def test_the_rule_finds_a_private_name(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "private_names", lambda: frozenset({"_private_name"}))
    assert known_to(source)
    assert not known_to(source.replace("_private", "public").replace("._", ".").replace(" _", " "))


def test_a_private_name_of_the_file_itself_is_not_the_packages() -> None:
    name = sorted(private_names())[0]
    assert known_to(f"store.{name}") == [name]
    assert known_to(f"def {name}(): ...\n\n\nstore.{name}") == []
