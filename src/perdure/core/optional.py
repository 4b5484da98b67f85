"""Libraries that come with an extra of perdure, such as `pip install 'perdure[privacy]'`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from perdure.core.errors import UserError


def require(module: str, key: str, extra: str, reason: str = "") -> Any:
    """Import and return an optional module.

    Args:
        module: Dotted name of the module.
        key: Config key that needs the module.
        extra: Extra of perdure that installs it.
        reason: Appended to the error in parentheses, if not empty.

    Raises:
        UserError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing_extra(key, extra, reason) from None


def missing_extra(key: str, extra: str, reason: str = "") -> UserError:
    """Return the error for a config key that needs an extra which is not installed."""
    detail = f" ({reason})" if reason else ""
    return UserError(f"{key}: requires pip install 'perdure[{extra}]'{detail}")


def is_installed(module: str) -> bool:
    """Return whether a top-level module is installed."""
    return importlib.util.find_spec(module) is not None
