"""Build the body of a model that a config names by a dotted path, or say why it cannot be built."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perdure.config import ModuleModel
from perdure.core.errors import UserError, bad_value
from perdure.core.given import is_object
from perdure.models.adapter.module_body import ModuleBody
from perdure.models.adapter.module_import import find_maker
from perdure.models.adapter.probe import BadModule
from perdure.models.weights import load_weights

log = logging.getLogger(__name__)

_ROWS = 6
AUTO = "auto"
"""Value of an argument that stands for the number of classes."""


@dataclass(frozen=True)
class ModuleSetup:
    """What a module is built with besides its config."""

    folder: Path | None = None
    """Where its file is looked up before the working folder."""
    seed: int = 0
    """Seed of its initial weights."""
    rows: Tensor | None = None
    """A few inputs, [rows, ...]. If None, random ones."""
    reads_weights: bool = True
    """Whether the file of `model.init` is read; not for a trained model."""


def make_module_body(
    config: ModuleModel, shape: tuple[int, ...], classes: int, setup: ModuleSetup
) -> ModuleBody:
    """Return the body of a custom model.

    Args:
        config: The `model` section.
        shape: Shape of an input.
        classes: Value of arguments that are `auto`.
        setup: Folder, seed and inputs.

    Raises:
        UserError: The module cannot be made or cannot be trained.
    """
    rows = _rows(setup.rows, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setup.seed)
        module = make_module(config, classes, setup.folder)
        try:
            _check(module)
            _materialize(module, rows)
            _load(module, config.init if setup.reads_weights else None)
            return ModuleBody(module, rows, config.head_layer, config.frozen)
        except BadModule as reason:
            raise bad_value("model.kind", config.kind, str(reason)) from reason.__cause__


def _rows(rows: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if rows is None or not len(rows):
        rows = torch.randn(_ROWS, *shape, generator=torch.Generator().manual_seed(0))
    return rows.cpu()[torch.arange(_ROWS) % len(rows)]


def make_module(config: ModuleModel, classes: int, folder: Path | None) -> nn.Module:
    """Return the module of a config, with weights drawn from the global generator."""
    maker = find_maker(config.kind, folder)
    if is_object(config.kind):
        if config.arguments:
            raise bad_value("model.arguments", config.arguments, "empty for a module that was made")
        module: Any = copy.deepcopy(maker)
    else:
        module = _called(maker, config.arguments, config.kind, classes, folder)
    if not isinstance(module, nn.Module):
        expected = (
            f"a class or function that makes an nn.Module (it makes a {type(module).__name__})"
        )
        raise bad_value("model.kind", config.kind, expected)
    return module


def _called(
    maker: Callable[..., Any], values: dict[str, Any], kind: str, classes: int, folder: Path | None
) -> Any:
    arguments = {key: _value(value, classes, folder) for key, value in values.items()}
    try:
        return maker(**arguments)
    except UserError:
        raise
    except Exception as error:  # whatever a constructor does
        if isinstance(error, TypeError):
            _check_arguments(maker, values, kind)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise bad_value("model.kind", kind, f"made with other arguments ({reason})") from error


def _value(value: Any, classes: int, folder: Path | None) -> Any:
    """Return an argument: `auto` is the number of classes, a mapping with a kind what it makes."""
    if value == AUTO:
        return classes
    if isinstance(value, dict) and isinstance(value.get("kind"), str) and "." in value["kind"]:
        inner = {key: v for key, v in value.items() if key != "kind"}
        return _called(find_maker(value["kind"], folder), inner, value["kind"], classes, folder)
    return value


def _check_arguments(maker: Callable[..., Any], values: dict[str, Any], kind: str) -> None:
    """Refuse arguments that the signature does not have, and missing ones."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):
        return
    names = list(signature.parameters)
    try:
        signature.bind(**values)
    except TypeError as error:
        unknown = next((key for key in values if key not in names), None)
        if unknown is None:
            raise bad_value("model.kind", kind, f"made with other arguments ({error})") from None
        raise UserError(
            f"model.{unknown}: unknown argument of {kind}, got {values[unknown]!r}; its arguments: "
            f"{', '.join(names) or 'none'}"
        ) from None


def _check(module: nn.Module) -> None:
    """Refuse modules that are refused whatever their inputs are."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        raise BadModule("a plain nn.Module (it is compiled)")
    required = [
        parameter.name
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 1:
        raise BadModule(f"a module whose forward needs one input (it needs {', '.join(required)})")
    for path, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            raise BadModule(f"a module without SyncBatchNorm ({path})")
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.momentum is None:
            raise BadModule(
                f"a module whose batch norms have a number as momentum ({path} has None)"
            )


def _materialize(module: nn.Module, rows: Tensor) -> None:
    """Let lazy modules find their sizes."""
    if any(isinstance(part, nn.modules.lazy.LazyModuleMixin) for part in module.modules()):
        with torch.no_grad():
            module(rows)


def _load(module: nn.Module, file: str | None) -> None:
    if file is None:
        return
    params = {name: value.detach() for name, value in module.named_parameters()}
    params, buffers, report = load_weights(file, params, dict(module.named_buffers()))
    module.load_state_dict(params | buffers, strict=False)
    log.info("%s", report.summary())
