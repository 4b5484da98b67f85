"""Old names of commands, which still work and name the new ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from perdure.cli.console import print_error


def renamed(command: Callable[..., None], old: str, new: str) -> Callable[..., None]:
    """Return a command that warns that `perdure OLD` is now `perdure NEW`, and then runs."""

    @wraps(command)
    def alias(**arguments: Any) -> None:
        print_error("warning", f"perdure {old} is now perdure {new}")
        command(**arguments)

    return alias
