"""Initial weights: from a safetensors file or a pretrained backbone, and which are trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.core.trees import Tensors, decode, to_device
from perdure.models.layers import Layer
from perdure.models.transformer import Encoder, random_params

# ---- The initial weights of a backbone, and the selection of those that are trained
#
# A backbone's weights are read once per process. They are the initial values of a backbone that is
# fine-tuned, and constants of a frozen one. Constants are not parameters: they are neither sent nor
# saved with a run.

Shapes = dict[str, tuple[int, ...]]
"""Shape of each parameter, by name."""


class Pretrained(Protocol):
    """A source of pretrained weights."""

    def weights(self, shapes: Shapes, device: str) -> Tensors:
        """Return the values of all parameters, which are read once per process."""

    def card(self) -> dict[str, Any]:
        """Return what identifies them: their name, kind, config and SHA-256."""


class BackboneShapes(Protocol):
    """The properties of a backbone that determine its initial weights."""

    @property
    def encoder(self) -> Encoder:
        """Its stack of blocks."""

    @property
    def shapes(self) -> Shapes:
        """Shape of each of its parameters."""


@dataclass(frozen=True)
class BackboneInit:
    """The source of a backbone's initial weights, and the number of blocks that are trained."""

    pretrained: Pretrained | None = None
    """Pretrained weights. If None, the weights are random."""
    trained_blocks: int | None = None
    """Number of trained blocks: the last ones, with the final norm. If None, the whole backbone is
    trained."""

    @property
    def card(self) -> dict[str, Any] | None:
        """Card of the pretrained weights, or None if there are none."""
        return None if self.pretrained is None else self.pretrained.card()

    def initial_params(self, body: BackboneShapes, generator: torch.Generator) -> Tensors:
        """Return the initial values of the trained parameters."""
        if self.pretrained is None and self.trained_blocks is None:
            return random_params(body.shapes, _all_layers(body), generator)
        constants = self.constants(body, "cpu")
        return {name: constants[name].clone() for name in self.trained_names(body)}

    def trained_names(self, body: BackboneShapes) -> tuple[str, ...]:
        """Return the names of the trained parameters."""
        if self.trained_blocks is None:
            return tuple(body.shapes)
        return body.encoder.last_block_names(self.trained_blocks)

    def trained_layers(self, body: BackboneShapes, before: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Return the trained weight matrices; `before` are those in front of the blocks."""
        names = set(self.trained_names(body))
        blocks = [layer for block in body.encoder.blocks for layer in block]
        return tuple(layer for layer in (*before, *blocks) if layer.name in names)

    def constants(self, body: BackboneShapes, device: str) -> Tensors:
        """Return the initial values of all parameters; random ones are the same in every run."""
        if self.pretrained is not None:
            return self.pretrained.weights(body.shapes, device)
        return _random(tuple(body.shapes.items()), _all_layers(body), device)

    def all_params(self, body: BackboneShapes, params: Tensors, device: str) -> Tensors:
        """Return all parameters: the trained ones in `params`, and the others as constants."""
        return params if self.trained_blocks is None else self.constants(body, device) | params


RANDOM_INIT = BackboneInit()


def _all_layers(body: BackboneShapes) -> tuple[Layer, ...]:
    return tuple(layer for block in body.encoder.blocks for layer in block)


@lru_cache(maxsize=4)
def _random(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], layers: tuple[Layer, ...], device: str
) -> Tensors:
    generator = Rng(0).torch_generator("backbone")
    values: Tensors = to_device(
        random_params(dict(shapes), layers, generator), torch.device(device)
    )
    return values


# ---- Load initial weights from a safetensors file, and report which names matched

_WRAPPERS = ("module.", "model.", "backbone.")
_HEADS = ("linear.", "fc.", "classifier.")
_OF_RUN = "model/model.safetensors"
"""The trained model in a run directory."""
_IGNORED = ".num_batches_tracked"


@dataclass(frozen=True)
class WeightReport:
    """The outcome for each name of the model and of the file."""

    loaded: tuple[str, ...]
    """Names that were loaded."""
    missing: tuple[str, ...]
    """Names that the file does not have; they keep their initial values."""
    unexpected: tuple[str, ...]
    """Names that only the file has."""
    wrong_shape: tuple[str, ...]
    """Names with another shape in the file; they keep their initial values."""

    def summary(self) -> str:
        """Return one line for the log."""
        total = len(self.loaded) + len(self.missing) + len(self.wrong_shape)
        sentences = [f"{len(self.loaded)} of {total} tensors loaded"]
        sentences += [
            f"{title}: {_listed(names)}"
            for title, names in (
                ("not in the file", self.missing),
                ("another shape in the file", self.wrong_shape),
                ("only in the file", self.unexpected),
            )
            if names
        ]
        return "; ".join(sentences)


def load_weights(
    path: str | Path, params: Tensors, buffers: Tensors
) -> tuple[Tensors, Tensors, WeightReport]:
    """Return parameters and buffers with the values of a file, and a report.

    Tensors are loaded if their name and shape are the same. A classifier in the file is loaded into
    a shared head if it has the same shape.

    Raises:
        UserError: The file cannot be read, or none of its tensors fits.

    """
    initial = params | buffers
    values = _renamed(_read(Path(path)), initial)
    loaded = {n: v for n, v in values.items() if n in initial and v.shape == initial[n].shape}
    if not loaded:
        raise bad_value("model.init", str(path), "a file whose names and shapes fit the model")
    report = WeightReport(
        loaded=tuple(n for n in initial if n in loaded),
        missing=tuple(n for n in initial if n not in values),
        unexpected=tuple(n for n in values if n not in initial),
        wrong_shape=tuple(n for n in initial if n in values and n not in loaded),
    )
    return _filled(params, loaded), _filled(buffers, loaded), report


def _read(path: Path) -> Tensors:
    if (path / _OF_RUN).is_file():
        return _trained(path / _OF_RUN)
    if not path.is_file():
        raise bad_value(
            "model.init", str(path), "a safetensors file or a run directory that exists"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"model.init: must be a safetensors file ({reason}), got {str(path)!r}"
        ) from None


def _trained(path: Path) -> Tensors:
    """Return the parameters and buffers of a trained model."""
    try:
        tree = decode(path.read_bytes())
        return {**tree["params"], **tree["buffers"]}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"model.init: must be a run with a model ({error}), got {str(path)!r}"
        ) from None


def _renamed(values: Tensors, initial: Tensors) -> Tensors:
    """Return the file's values by our names."""
    result: Tensors = {}
    for name, value in values.items():
        if not name.endswith(_IGNORED):
            result[_our_name(name, initial)] = value
    return result


def _our_name(name: str, initial: Tensors) -> str:
    """Return our name for a tensor of the file; if there is none, its name without wrappers."""
    bare = _unwrapped(name, initial)
    heads = ["head." + bare.removeprefix(p) for p in _HEADS if bare.startswith(p)]
    names = [bare, bare.replace(".shortcut.", ".downsample."), *heads]
    return next((known for known in names if known in initial), bare)


def _unwrapped(name: str, initial: Tensors) -> str:
    """Return the name without the prefixes of wrappers."""
    prefix = next((p for p in _WRAPPERS if name not in initial and name.startswith(p)), None)
    return _unwrapped(name.removeprefix(prefix), initial) if prefix else name


def _filled(initial: Tensors, loaded: Tensors) -> Tensors:
    return {n: loaded[n].to(v.dtype).clone() if n in loaded else v for n, v in initial.items()}


def _listed(names: tuple[str, ...], limit: int = 4) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
