"""List the benchmarks, or run one and keep its figures as JSON.

python -m benchmarks [NAME] [--out FILE] [--json]
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import benchmarks
from perdure.cli.console import print_error, print_json, setup_logging, stdout_console, text_table
from perdure.core.errors import PerdureError, UserError, bad_value
from tools.results import with_code, write_results

HELPERS = {"__main__", "turns"}  # files of this folder that are no benchmarks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code; an error is one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure speed or memory against a reference on this machine.",
    )
    parser.add_argument("name", nargs="?", help="a benchmark; default: list all of them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures to a JSON file")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    given = parser.parse_args(arguments)
    setup_logging()
    try:
        if given.name is None:
            show_list(given.json)
        else:
            print_json(run_benchmark(given.name, given.out))
    except PerdureError as error:
        print_error("error", str(error))
        return error.exit_code
    return 0


def show_list(as_json: bool) -> None:
    rows = {name: (module(name).__doc__ or "").partition("\n")[0] for name in benchmark_names()}
    if as_json:
        print_json([{"name": name, "measures": measures} for name, measures in rows.items()])
    else:
        stdout_console().print(text_table(["name", "measures"], rows.items()))


def benchmark_names() -> list[str]:
    return sorted({found.name for found in pkgutil.iter_modules(benchmarks.__path__)} - HELPERS)


def run_benchmark(name: str, out: Path | None) -> dict[str, Any]:
    """Run one benchmark and return its figures; write them to `out` unless it is None."""
    if name not in benchmark_names():
        raise bad_value("NAME", name, f"one of {', '.join(benchmark_names())}")
    if out is not None and not out.resolve().parent.is_dir():
        raise UserError(f"--out {out}: the folder does not exist")
    figures = with_code(module(name).main())
    if out is not None:
        write_results(out, figures)
    return figures


def module(name: str) -> Any:
    return import_module(f"benchmarks.{name}")


if __name__ == "__main__":
    sys.exit(main())
