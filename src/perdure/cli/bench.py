"""perdure bench: list the benchmarks, or run one and keep its figures as JSON."""

from __future__ import annotations

import json
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure import benchmarks
from perdure.cli.arguments import Json
from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.tables import text_table
from perdure.core.errors import UserError, bad_value
from perdure.core.files import write_atomic


def bench(
    name: Annotated[
        str | None, typer.Argument(help="A benchmark. Default: list all of them.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the figures to this JSON file.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure speed or memory against a reference on this machine, and print the figures as JSON.

    Without NAME, list the benchmarks.
    """
    setup_logging()
    if name is not None:
        print_json(run_benchmark(name, out))
    elif as_json:
        print_json([{"name": each, "measures": summary(each)} for each in benchmark_names()])
    else:
        rows = [[each, summary(each)] for each in benchmark_names()]
        stdout_console().print(text_table(["name", "measures"], rows))


def benchmark_names() -> list[str]:
    """Return the names of all benchmarks, sorted."""
    modules = pkgutil.iter_modules(benchmarks.__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def summary(name: str) -> str:
    """Return the first line of a benchmark's docstring."""
    return (_module(name).__doc__ or "").partition("\n")[0]


def run_benchmark(name: str, out: Path | None) -> dict[str, Any]:
    """Run one benchmark and return its figures; write them to `out` unless it is None."""
    if name not in benchmark_names():
        raise bad_value("bench", name, f"one of {', '.join(benchmark_names())}")
    if out is not None and not out.resolve().parent.is_dir():
        raise UserError(f"--out {out}: the folder does not exist")
    figures: dict[str, Any] = _module(name).main()
    if out is not None:
        write_atomic(out, (json.dumps(figures, indent=2) + "\n").encode())
    return figures


def _module(name: str) -> Any:
    return import_module(f"{benchmarks.__name__}.{name}")
