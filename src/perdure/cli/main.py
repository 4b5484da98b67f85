"""All commands, and the one sentence that reports an error or Ctrl-C."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from perdure.cli.console import Stopped, print_error
from perdure.core.errors import PerdureError
from perdure.core.text import shell_spelling
from perdure.core.version import __version__

# ---- The commands. Each is a function, or a group, of its own name in a file of this folder
#
# The file is loaded when its command is used: most load torch, which takes seconds.


class _Listed(NamedTuple):
    """A command in the list of all commands."""

    help: str
    """The first sentence of the command's docstring."""
    panel: str | None = None
    """Title of its panel in the list."""
    file: str | None = None
    """File of the command, if it is not named like the command."""


COMMANDS = {
    "demo": _Listed(
        "Compare methods on streams of digits with references, print tables and write reports."
    ),
    "run": _Listed("Train the experiment of a config, and write a run directory."),
    "extend": _Listed("Add tasks to a run, and train them."),
    "rewind": _Listed(
        "Go back to the end of an earlier task of a run; without --task, list them.", file="extend"
    ),
    "check": _Listed("Check a config: build its data, model and method, and write nothing."),
    "compare": _Listed(
        "Run every method with every seed, and print means, deviations and differences."
    ),
    "watch": _Listed("Follow runs of other processes until all of them have ended."),
    "report": _Listed(
        "Compare finished runs on one HTML page that needs no network, or print their table."
    ),
    "predict": _Listed("Predict the class or the number of every input, without a task label."),
    "export": _Listed("Write the trained model as one file that needs no perdure to run."),
    "serve": _Listed(
        "Serve predictions of the newest model of RUN over HTTP, with a web page for images."
    ),
    "federation": _Listed("Set up, serve and use a federation of real machines."),
    "methods": _Listed(
        "List the methods with their papers, streams and hyperparameters, or explain one.",
        "Reference",
    ),
    "recipes": _Listed(
        "List the recipes, which are configs that are ready to run, or print one of them.",
        "Reference",
    ),
    "env": _Listed(
        "Print the versions, threads, devices and extras of this installation, for bug reports.",
        "Reference",
    ),
    "data": _Listed("Data sets that a config can name.", "Reference"),
    "config": _Listed("What a config may hold.", "Reference"),
}


class _Commands(TyperGroup):
    """Loads the file of a command when the command is used."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name of the command, the command, and its arguments."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, find_command(name) if name in COMMANDS else listed, rest


def find_command(name: str) -> Any:
    """Return a command, after loading its file."""
    found = getattr(import_module(f"perdure.cli.{COMMANDS[name].file or name}"), name)
    group = _group()
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name)
    else:
        group.command(name)(found)
    return typer.main.get_group(group).commands[name]


def _group() -> typer.Typer:
    """Return a group without commands."""
    return typer.Typer(
        cls=_Commands,
        callback=perdure,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # joins the lines of a docstring's paragraph
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perdure {__version__}")
        raise typer.Exit


def perdure(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Federated continual learning: many private clients, one model, tasks that keep arriving."""


app = _group()
for _name, _listed in COMMANDS.items():
    app.command(_name, help=_listed.help, rich_help_panel=_listed.panel)(lambda: None)


# ---- Run a command, and report an error or Ctrl-C in one sentence

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
    """Return whether memory ran out, also that of torch, which may not have been loaded."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY in str(error))
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
