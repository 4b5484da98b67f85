"""perdure methods: what there is to choose from."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding

from perdure.cli.console import stdout_console
from perdure.contract.needs import ALL_STREAMS
from perdure.methods import KINDS, build, hyperparameters


def methods() -> None:
    """List the methods with their papers, streams and hyper-parameters."""
    console = stdout_console()
    for kind in KINDS:
        show(kind, console)


def show(kind: str, console: Console) -> None:
    """A method in three lines."""
    found = build({"kind": kind})
    console.print(f"{kind}: {found.paper}", style="bold")
    known = found.needs.streams
    streams = "all" if known == ALL_STREAMS else ", ".join(sorted(known))
    options = ", ".join(f"{name}={value}" for name, value in hyperparameters(kind).items())
    console.print(Padding(f"streams: {streams}", (0, 0, 0, 4), expand=False))
    console.print(Padding(f"hyper-parameters: {options or 'none'}", (0, 0, 0, 4), expand=False))
