"""Initial weights from a safetensors file, with a report of what matched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from perdure.core.errors import UserError, bad_value
from perdure.core.trees import Tensors

_WRAPPERS = ("module.", "model.", "backbone.")
_HEADS = ("linear.", "fc.", "classifier.")
_IGNORED = ".num_batches_tracked"


@dataclass(frozen=True)
class WeightReport:
    """What became of each name: those of the model, and those that only the file has."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """Of the model, not in the file: these keep their first values."""
    unexpected: tuple[str, ...]
    """Of the file, not of the model."""
    wrong_shape: tuple[str, ...]
    """Of the model, with another shape in the file: these keep their first values."""

    def summary(self) -> str:
        """One line for the log."""
        total = len(self.loaded) + len(self.missing) + len(self.wrong_shape)
        parts = [f"{len(self.loaded)} of {total} tensors loaded"]
        parts += [
            f"{title}: {_listed(names)}"
            for title, names in (
                ("not in the file", self.missing),
                ("another shape in the file", self.wrong_shape),
                ("only in the file", self.unexpected),
            )
            if names
        ]
        return "; ".join(parts)


def load_weights(
    path: str | Path, params: Tensors, buffers: Tensors
) -> tuple[Tensors, Tensors, WeightReport]:
    """Parameters and buffers with the values of the file where names and shapes agree.

    A classifier of the file goes into a shared head if it has that shape and is left out
    otherwise. A file of which nothing fits is refused.
    """
    own = params | buffers
    found = _renamed(_read(Path(path)), own)
    loaded = {n: v for n, v in found.items() if n in own and v.shape == own[n].shape}
    if not loaded:
        raise bad_value("model.init", str(path), "a file whose names and shapes fit the model")
    report = WeightReport(
        loaded=tuple(n for n in own if n in loaded),
        missing=tuple(n for n in own if n not in found),
        unexpected=tuple(n for n in found if n not in own),
        wrong_shape=tuple(n for n in own if n in found and n not in loaded),
    )
    return _filled(params, loaded), _filled(buffers, loaded), report


def _read(path: Path) -> Tensors:
    if not path.is_file():
        raise bad_value("model.init", str(path), "a safetensors file that exists")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"model.init: must be a safetensors file ({reason}), got {str(path)!r}"
        ) from None


def _renamed(values: Tensors, own: Tensors) -> Tensors:
    """The file's values by our names."""
    result: Tensors = {}
    for name, value in values.items():
        if not name.endswith(_IGNORED):
            result[_our_name(name, own)] = value
    return result


def _our_name(name: str, own: Tensors) -> str:
    """Our name for a tensor of the file, or its own where we have none."""
    bare = _unwrapped(name, own)
    heads = ["head." + bare.removeprefix(p) for p in _HEADS if bare.startswith(p)]
    names = [bare, bare.replace(".shortcut.", ".downsample."), *heads]
    return next((each for each in names if each in own), bare)


def _unwrapped(name: str, own: Tensors) -> str:
    """The name without what wrappers put before it."""
    prefix = next((p for p in _WRAPPERS if name not in own and name.startswith(p)), None)
    return _unwrapped(name.removeprefix(prefix), own) if prefix else name


def _filled(old: Tensors, new: Tensors) -> Tensors:
    return {n: new[n].to(v.dtype).clone() if n in new else v for n, v in old.items()}


def _listed(names: tuple[str, ...], most: int = 4) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
