"""Arguments in messages as the caller writes them: `out='a'` in Python, `--out a` in a shell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IN_SHELL: ContextVar[bool] = ContextVar("in_shell", default=False)


@contextmanager
def shell_spelling() -> Iterator[None]:
    """Spell arguments as options of a command for a while."""
    token = _IN_SHELL.set(True)
    try:
        yield
    finally:
        _IN_SHELL.reset(token)


def argument(name: str, value: object = None, option: str | None = None) -> str:
    """Return an argument as the caller writes it.

    Args:
        name: Its name in Python.
        value: Its value. If None, the name alone; True is an option without a value.
        option: Its option in a shell. If None, `--` and the name.

    Example:
        >>> argument("out", "runs/a"), argument("resume", True)
        ("out='runs/a'", 'resume=True')
        >>> with shell_spelling():
        ...     argument("out", "runs/a"), argument("resume", True)
        ('--out runs/a', '--resume')
    """
    if _IN_SHELL.get():
        spelled = option or f"--{name.replace('_', '-')}"
        return spelled if value is None or value is True else f"{spelled} {value}"
    if value is None:
        return name
    return f"{name}={value if isinstance(value, bool | int | float) else repr(str(value))}"
