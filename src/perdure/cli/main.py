"""All commands, and the one sentence that reports an error or Ctrl-C."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import typer

from perdure.cli.check import check
from perdure.cli.compare import compare
from perdure.cli.console import Stopped, print_error
from perdure.cli.data import data
from perdure.cli.demo import demo
from perdure.cli.env import env
from perdure.cli.export import export
from perdure.cli.extend import extend, rewind
from perdure.cli.federation import federation
from perdure.cli.methods import config, methods
from perdure.cli.predict import predict
from perdure.cli.recipes import recipes
from perdure.cli.report import report
from perdure.cli.run import run
from perdure.cli.serve import serve
from perdure.cli.watch import watch
from perdure.core.errors import PerdureError
from perdure.core.text import shell_spelling
from perdure.core.version import __version__

Command = Callable[..., None]
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # joins the lines of a docstring's paragraph
)
_TRAINING: tuple[Command, ...] = (
    demo, run, extend, rewind, check, compare, watch, report, predict, export, serve,
)  # fmt: skip
_REFERENCE: tuple[Command, ...] = (methods, recipes, env)
for command in _TRAINING:
    app.command()(command)
app.add_typer(federation, name="federation")
for command in _REFERENCE:
    app.command(rich_help_panel="Reference")(command)
app.add_typer(data, name="data", rich_help_panel="Reference")
app.add_typer(config, name="config", rich_help_panel="Reference")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def perdure(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Federated continual learning: many private clients, one model, tasks that keep arriving."""


_USER_ERRORS = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of a path that the user gave, unlike a full disk."""
_NO_MEMORY = "can't allocate memory"
_REPEATED = re.compile(r"(Did you mean [^?]*\?)(?: \1)+")
"""A suggestion that both typer and click make."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; an error is one sentence on stderr."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with shell_spelling():
            code = app(args=words, prog_name="perdure", standalone_mode=False)
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
        return 2 if isinstance(error, _USER_ERRORS) else 1
    except Exception as error:
        if _is_out_of_memory(error):
            print_error("error", f"not enough memory on this machine ({_requested(error)})")
            return 1
        return _bad_usage(error)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out; torch on a CPU raises a RuntimeError with a sentence."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY in str(error)
    )


def _requested(error: Exception) -> str:
    """Return the part of the message about the requested memory, without source locations."""
    first = str(error).partition("\n")[0].rpartition(_NO_MEMORY + ": ")[2]
    return first.partition(". ")[0].rstrip(".")


def _bad_usage(error: Exception) -> int:
    """Report an unknown command or option, which typer raises as its own exceptions."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{format_message()}\n")
    else:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "perdure"
        message = _REPEATED.sub(r"\1", format_message()).rstrip(".")
        print_error("error", f"{message} (see {command} --help)")
    return int(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    sys.exit(main())
