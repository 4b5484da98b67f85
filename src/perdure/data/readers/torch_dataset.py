"""Map-style datasets of torch, read once from the first example to the last."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perdure.config import CustomData
from perdure.data.readers.image_folder import Opener, decode_images
from perdure.data.rows import Part, Rows
from perdure.data.source import Array, ConfigLocation


def torch_rows(train: Any, test: Any, config: CustomData, location: ConfigLocation) -> Rows:
    """Return the rows of a torch Dataset, and of one with test data.

    Args:
        train: A map-style Dataset whose examples are pairs of an input and a label.
        test: One with test data. If None, there is none.
        config: The section with `size` and `channels`, which images of Pillow may need.
        location: The position of the section in the config.

    Raises:
        ValueError: It has no length or no examples, or its examples are no pairs of one shape.
    """
    parts = [
        _part(data, suffix, config, location)
        for data, suffix in ((train, "_train"), (test, "_test"))
        if data is not None
    ]
    return Rows(parts[0], parts[1] if len(parts) > 1 else None, _class_names(train))


def _class_names(data: Any) -> tuple[str, ...] | None:
    """Return the names in the attribute `classes` of a dataset, or of one that it is a part of."""
    while not hasattr(data, "classes") and hasattr(data, "dataset"):
        data = data.dataset
    names = getattr(data, "classes", None)
    is_named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_named and names else None


def _part(data: Any, suffix: str, config: CustomData, location: ConfigLocation) -> Part:
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ValueError(f"{type(data).__name__} is not a map-style Dataset with a length")
    if not len(data):
        raise ValueError(f"{type(data).__name__} has no examples")
    pairs = [_pair(data[index], index) for index in range(len(data))]
    inputs, labels = zip(*pairs, strict=True)
    y = np.array([label.item() if isinstance(label, Tensor) else label for label in labels])
    return Part(_stacked(list(inputs), config, location), y, suffix=suffix)


def _pair(example: Any, index: int) -> tuple[Any, Any]:
    if not isinstance(example, tuple | list) or len(example) < 2:
        kind = type(example).__name__
        raise ValueError(f"example {index} is {kind}, not a pair of an input and a label")
    return example[0], example[1]


def _stacked(
    inputs: list[Any], config: CustomData, location: ConfigLocation
) -> Array | Tensor | list[Any]:
    """Return inputs as one array, as a tensor (channels first), or as texts."""
    first = inputs[0]
    if isinstance(first, str):
        return inputs
    if isinstance(first, Image.Image):
        openers: list[Opener] = [_opener(image) for image in inputs]
        names = [f"image {index}" for index in range(len(inputs))]
        return decode_images(openers, names, config, location)
    shapes = [tuple(np.shape(value)) for value in inputs]
    other = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise ValueError(f"example {other} has the shape {shapes[other]}, example 0 {shapes[0]}")
    return torch.stack(inputs) if isinstance(first, Tensor) else np.stack(inputs)


def _opener(image: Image.Image) -> Opener:
    return image.copy
