"""perdure bench: run a benchmark of the repository and keep its figures as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.console import setup_logging, stdout_console
from perdure.core.errors import UserError, bad_value
from perdure.core.files import write_atomic


def bench(
    name: Annotated[str, typer.Argument(help="Such as engine, pool, methods or prompts.")],
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Measure speed or memory against a yardstick, in one run on this machine."""
    setup_logging()
    figures = run_benchmark(name, out)
    stdout_console().print_json(data=figures)


def folder() -> Path:
    """Where the benchmarks are: beside src in a checkout."""
    found = Path(__file__).resolve().parents[3] / "benchmarks"
    if not found.is_dir():
        raise UserError("bench: the benchmarks are part of the repository, run it in a checkout")
    return found


def names() -> list[str]:
    """The benchmarks there are."""
    return sorted(path.stem for path in folder().glob("[!_]*.py"))


def run_benchmark(name: str, out: Path | None) -> dict[str, Any]:
    """Run one benchmark; write its figures to `out` if given."""
    if name not in names():
        raise bad_value("bench", name, ", ".join(names()))
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder does not exist")
    figures = _main(folder() / f"{name}.py")()
    if out is not None:
        write_atomic(out, (json.dumps(figures, indent=2) + "\n").encode())
    return figures


def _main(path: Path) -> Callable[[], dict[str, Any]]:
    if str(path.parent) not in sys.path:  # benchmarks share modules beside them
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"perdure_benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    main: Callable[[], dict[str, Any]] = module.main
    return main
