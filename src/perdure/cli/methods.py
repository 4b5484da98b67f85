"""perdure methods: list the methods, or explain one."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding

from perdure.cli.console import print_json, stdout_console
from perdure.cli.options import Json
from perdure.config.sentences import value_in_words
from perdure.contract.needs import ALL_STREAMS
from perdure.methods.registry import (
    METHODS,
    build,
    describe_hyperparameters,
    find,
    hyperparameters,
)


def methods(
    kind: Annotated[
        str | None,
        typer.Argument(help="A method to explain: its name or dotted path.", metavar="KIND"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods with their papers, streams and hyperparameters, or explain one."""
    console = stdout_console()
    if as_json:
        print_json([as_document(name) for name in ([kind] if kind else METHODS.names())])
    elif kind is not None:
        explain(kind, console)
    else:
        for name in METHODS.names():
            show(name, console)


def as_document(kind: str) -> dict[str, Any]:
    """Return a method's name, paper, streams, fields that the server sees, and hyperparameters."""
    needs, described = build({"kind": kind}).needs, describe_hyperparameters(kind)
    return {
        "kind": kind,
        "paper": find(kind).paper,
        "streams": sorted(needs.streams),
        "per_client_fields": list(needs.per_client_fields),
        "hyperparameters": [
            {"name": each.name, "type": each.type, "default": each.default, "meaning": each.meaning}
            for each in described
        ],
    }


def show(kind: str, console: Console) -> None:
    """Print a method in three lines."""
    method = build({"kind": kind})
    console.print(f"{kind}: {method.paper}", style="bold")
    options = ", ".join(f"{name}={value}" for name, value in hyperparameters(kind).items())
    _print_indented(console, f"streams: {_streams(kind)}")
    _print_indented(console, f"hyperparameters: {options or 'none'}")


def explain(kind: str, console: Console) -> None:
    """Print the description of a method, and every hyperparameter with its meaning."""
    method = find(kind)
    console.print(f"{kind}: {method.paper}", style="bold")
    console.print(inspect.cleandoc(method.__doc__ or ""), markup=False)
    console.print(f"\nstreams: {_streams(kind)}")
    for each in describe_hyperparameters(kind):
        default = value_in_words(each.default)
        console.print(f"\n{each.name} ({each.type}), default {default}", markup=False)
        _print_indented(console, each.meaning)


def _streams(kind: str) -> str:
    known = build({"kind": kind}).needs.streams
    return "all" if known == ALL_STREAMS else ", ".join(sorted(known))


def _print_indented(console: Console, text: str) -> None:
    console.print(Padding(text, (0, 0, 0, 4), expand=False), markup=False)
