"""The optional libraries of the extra `privacy`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from perdure.core.errors import UserError


def require(module: str, key: str) -> Any:
    """A module of the extra; without it one sentence that names the key which asks for it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"{key}: needs {module}, allowed once the extra is installed: "
            "pip install 'perdure[privacy]'"
        ) from None


def is_installed(module: str) -> bool:
    """Whether a module of the extra is installed."""
    return importlib.util.find_spec(module) is not None
