"""Results files: figures as JSON, with a hash of the code that they were measured with.

    python -m tools.results

lists the results files of docs/measured whose hash is not that of the working tree.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perdure.core.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "measured"
WITHOUT = ("cli", "recipes", "report")
"""Packages of perdure that show or start what is measured and change no figure. A results file says
its own settings, hence no recipes. Every other package counts, a new one, too."""


def code_hash(package: Path = ROOT / "src" / "perdure") -> str:
    """Return a hash of the code that figures depend on, 16 hexadecimal digits.

    It covers the names and contents of all files of the package except those of `WITHOUT`.
    Comments, docstrings and empty lines do not count: who explains the code need not measure again.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        parts = path.relative_to(package).parts
        if parts[0] in WITHOUT or "__pycache__" in parts or not path.is_file():
            continue
        content = path.read_bytes()
        if path.suffix == ".py":
            content = "\n".join(_statements(content.decode())).encode()
        digest.update(f"{'/'.join(parts)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _statements(source: str) -> Iterator[str]:
    """Yield the lines of a file without comments, docstrings and empty lines.

    The text is cut instead of printed from its tree, which would depend on Python's version.
    """
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int() as last):
                lines[first - 1] = lines[first - 1][: node.col_offset]
                lines[first:last] = [""] * (last - first)
    yield from (line.rstrip() for line in lines if line.strip())


def with_code(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with the hash of the code, which comes first."""
    return {"code": code_hash(), **figures}


def write_results(path: Path, figures: Mapping[str, Any]) -> None:
    """Write a results file."""
    write_atomic(path, (json.dumps(with_code(figures), indent=2) + "\n").encode())


def kept_results(path: Path) -> dict[str, Any]:
    """Return a results file to which a tool adds; empty if there is none or other code made it."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if found.get("code") == code_hash() else {}


def block(name: str, table: str) -> str:
    """Return the part of a page that shows a results file: a table between two comments."""
    return f"<!-- figures: docs/measured/{name}.json -->\n\n{table}\n\n<!-- /figures -->"


def with_block(text: str, name: str, table: str) -> str:
    """Return a page with the part that shows a results file replaced."""
    pattern = rf"<!-- figures: docs/measured/{name}\.json -->.*?<!-- /figures -->"
    new, count = re.subn(pattern, lambda _: block(name, table), text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"needs one <!-- figures: docs/measured/{name}.json --> part, has {count}")
    return new


def outdated(folder: Path = MEASURED) -> dict[str, str]:
    """Return the reason by name of each results file that other code than this tree's has made."""
    head = code_hash()
    found = {path.name: _code(path) for path in sorted(folder.glob("*.json"))}
    return {
        name: f"its code is {code}, the tree's is {head}" if code else "it names no code"
        for name, code in found.items()
        if code != head
    }


def _code(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8")).get("code", ""))


def main() -> int:
    """Print the results files that have to be measured again; exit code 1 if there are any."""
    found = outdated()
    for name, reason in found.items():
        print(f"docs/measured/{name}: {reason}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
