"""perdure methods: what there is to choose from."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding

from perdure.cli.messages import results
from perdure.methods import KINDS, find, hyper_parameters
from perdure.methods.base import ALL_STREAMS


def methods() -> None:
    """List the methods with their papers, streams and hyper-parameters."""
    console = results()
    for kind in KINDS:
        show(kind, console)


def show(kind: str, console: Console) -> None:
    """A method in three lines."""
    found = find(kind)
    console.print(f"{kind}: {found.paper}", style="bold")
    streams = "all" if found.streams == ALL_STREAMS else ", ".join(sorted(found.streams))
    options = ", ".join(f"{name}={value}" for name, value in hyper_parameters(kind).items())
    console.print(Padding(f"streams: {streams}", (0, 0, 0, 4), expand=False))
    console.print(Padding(f"hyper-parameters: {options or 'none'}", (0, 0, 0, 4), expand=False))
