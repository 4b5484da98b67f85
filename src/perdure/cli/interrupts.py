"""Runs that stop before their end, and the command that goes on with them."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from perdure.contract.checks import ContractError
from perdure.core.errors import PerdureError, RunError


class Stopped(PerdureError):
    """Stopped by Ctrl-C; the exit code is the one that shells use for it."""

    exit_code = 130


@contextmanager
def resumable(out: Path | None, command: Sequence[str]) -> Iterator[None]:
    """Say how to go on, where there is something to go on with."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(_how(out, command)) from None
    except ContractError:
        raise  # going on would end at the same place: the method has to be corrected
    except RunError as error:
        raise RunError(f"{error}; {_how(out, command)}") from None


def _how(out: Path | None, command: Sequence[str]) -> str:
    if out is None or not (out / "config.yaml").is_file():
        return "nothing was written"
    return f"every finished round is kept; go on with: {shell_command(command)}"


def shell_command(command: Sequence[str]) -> str:
    """A command as it is typed."""
    return subprocess.list2cmdline(command) if os.name == "nt" else shlex.join(command)
