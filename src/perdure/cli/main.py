"""The command line: every command, and what a mistake, a failure or Ctrl-C looks like."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from perdure.cli.bench import bench
from perdure.cli.check import check
from perdure.cli.claims import claims
from perdure.cli.compare import compare
from perdure.cli.console import print_error
from perdure.cli.demo import demo
from perdure.cli.federation import federation, node, server, submit
from perdure.cli.interrupts import Stopped
from perdure.cli.methods import methods
from perdure.cli.predict import predict
from perdure.cli.recipes import recipes
from perdure.cli.report import report
from perdure.cli.run import run
from perdure.cli.watch import watch
from perdure.core.errors import PerdureError
from perdure.core.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, compare, watch, report, demo, check, methods, recipes, claims, predict, bench):
    app.command()(command)
for remote in (server, node, submit):
    app.command(rich_help_panel="Federation")(remote)
app.add_typer(federation, name="federation", rich_help_panel="Federation")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def perdure(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Federated continual learning: many private clients, one model, tasks that keep arriving."""


_MISTAKES = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""A path that cannot be, rather than a disk that is full."""
_NO_MEMORY = "can't allocate memory"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a mistake or a failure is one sentence on stderr. Returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(args=given, prog_name="perdure", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except Stopped as stop:
        print_error("stopped", str(stop))
        return stop.exit_code
    except PerdureError as error:
        print_error("error", str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("stopped", "nothing was written")
        return Stopped.exit_code
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error("error", f"{where}{error.strerror or error}")
        return 2 if isinstance(error, _MISTAKES) else 1
    except Exception as error:
        if _is_out_of_memory(error):
            print_error("error", f"this machine has too little memory for that ({_few(error)})")
            return 1
        return _bad_usage(error)


def _is_out_of_memory(error: Exception) -> bool:
    """Numpy and CUDA have types for it, torch on a CPU has a sentence."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY in str(error)
    )


def _few(error: Exception) -> str:
    """What a library says of how much was wanted, without where in its code it was noticed."""
    first = str(error).partition("\n")[0].rpartition(_NO_MEMORY + ": ")[2]
    return first.partition(". ")[0].rstrip(".")


def _bad_usage(error: Exception) -> int:
    """Unknown commands and flags, which typer reports by exceptions of its own."""
    sentence = getattr(error, "format_message", None)
    if sentence is None:
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{sentence()}\n")
    else:
        print_error("error", f"{sentence()} See perdure --help")
    return int(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    sys.exit(main())
