"""Stopped and failed runs, and the command that resumes them."""

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
    """Stopped by Ctrl-C; the exit code is the usual one of shells."""

    exit_code = 130


@contextmanager
def resumable(out: Path, command: Sequence[str]) -> Iterator[None]:
    """Report how to resume a run that is stopped or fails, if something was written.

    Args:
        out: Run directory.
        command: Command that resumes the run.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(_outcome(out, command)) from None
    except ContractError:
        raise  # resuming would fail the same way: the method has to be corrected
    except RunError as error:
        raise RunError(f"{error}; {_outcome(out, command)}") from None


@contextmanager
def stoppable(command: Sequence[str]) -> Iterator[None]:
    """Report how to resume when Ctrl-C stops several runs."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(resume_hint(command)) from None


def resume_hint(command: Sequence[str]) -> str:
    """Return the sentence that names the command to resume with."""
    return f"all finished rounds are saved; resume with: {shell_command(command)}"


def _outcome(out: Path, command: Sequence[str]) -> str:
    saved = (out / "config.yaml").is_file()
    return resume_hint(command) if saved else "nothing was written"


def shell_command(command: Sequence[str]) -> str:
    """Return a command as it is typed in a shell."""
    return subprocess.list2cmdline(command) if os.name == "nt" else shlex.join(command)
