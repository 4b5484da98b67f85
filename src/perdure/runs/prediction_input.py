"""Reading files to predict on: arrays, images, texts and tables.

Images are resized only if those of the training data were.
"""

from __future__ import annotations

import json
import logging
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perdure.config import FolderData
from perdure.core.errors import UserError, bad_value
from perdure.data.checks import check_features, check_images
from perdure.data.readers.image_folder import SUFFIXES, decode_images
from perdure.data.readers.table_columns import TABLE_SUFFIXES, TableFile
from perdure.data.readers.text import read_lines
from perdure.data.resize import fit_images
from perdure.data.source import ConfigLocation
from perdure.runs.trained_model import TrainedModel

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Rows = tuple[list[str], Tensor]
_ARRAYS = (".npy", ".npz")
_TEXTS = (".txt", ".jsonl", ".jsonl.gz")


def read_input(path: Path, model: TrainedModel) -> Rows:
    """Read a file or a folder of images for prediction.

    Args:
        path: An array (.npy, .npz), an image, a folder of images, texts (.txt, .jsonl) or a table
            (.csv, .csv.gz, .parquet).
        model: The model that will predict.

    Returns:
        The names of the examples, and the examples as the model's inputs: [N, *shape].

    Raises:
        UserError: The file cannot be read or does not fit the model.
    """
    if path.is_dir():
        return _folder(path, model)
    if not path.is_file():
        raise bad_value("INPUT", str(path), "a file or a folder that exists")
    if path.suffix.lower() in _ARRAYS:
        return _array(path, model)
    if path.name.lower().endswith(TABLE_SUFFIXES):
        return _table(path, model)
    if path.suffix.lower() in SUFFIXES:
        return [path.name], _image(path, model)
    if len(model.shape) == 3:
        raise bad_value("INPUT", str(path), "a .npy or .npz file, an image or a folder of images")
    if path.name.lower().endswith(_TEXTS):
        return _texts(path, model)
    raise bad_value("INPUT", str(path), "a .npy or .npz file, or texts in .txt or .jsonl")


def _table(path: Path, model: TrainedModel) -> Rows:
    """Read the columns of a table that the model was trained on; other columns are not used."""
    if model.feature_names is None:
        raise bad_value("INPUT", str(path), "no table, since the model was not trained on one")
    delimiter = getattr(model.config.data, "delimiter", ",")
    try:
        values, _ = TableFile(path, delimiter, "INPUT").read(model.feature_names, [])
    except ValueError as error:
        raise bad_value("INPUT", str(path), f"a valid table ({error})") from None
    return [str(number) for number in range(len(values))], torch.from_numpy(values).float()


def _texts(path: Path, model: TrainedModel) -> Rows:
    """Read one text per line, or the text column of JSON lines."""
    try:
        lines = [line.rstrip("\n") for line in read_lines(path) if line.strip()]
        if not path.name.lower().endswith(".txt"):
            column = getattr(model.config.data, "text_column", "text")
            lines = [str(json.loads(line)[column]) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise bad_value("INPUT", str(path), f"texts that can be read ({error})") from None
    if not lines:
        raise bad_value("INPUT", str(path), "a file with at least one text")
    return [str(number) for number in range(len(lines))], model.text_rows(lines)


def _folder(path: Path, model: TrainedModel) -> Rows:
    files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)
    if not files:
        raise bad_value("INPUT", str(path), "a folder that holds images")
    return [file.name for file in files], torch.cat([_image(file, model) for file in files])


def _image(path: Path, model: TrainedModel) -> Tensor:
    if len(model.shape) != 3 or model.dtype != torch.uint8:
        expected = f"an array, since the model takes rows of {model.shape} numbers"
        raise bad_value("INPUT", str(path), expected)
    config = FolderData(path=str(path), channels=1 if model.shape[0] == 1 else 3)
    pixels = decode_images([lambda: Image.open(path)], [str(path)], config, ConfigLocation("INPUT"))
    return _fitted(pixels, path, model)


def _array(path: Path, model: TrainedModel) -> Rows:
    values = _load(path)
    if model.dtype == torch.float32:
        rows = _numbers(values, path, model)
        return [str(number) for number in range(len(rows))], rows
    if values.dtype == np.uint8 and values.shape == model.shape:
        values = values[None]  # a single row
    if values.dtype == np.uint8 and values.shape[1:] == model.shape:
        rows = torch.from_numpy(np.ascontiguousarray(values))
    elif len(model.shape) == 3:
        rows = _fitted(_images(values, path), path, model)
    else:
        got = f"{values.dtype} of shape {values.shape}"
        raise UserError(f"INPUT {path}: must be uint8 rows of {model.shape}, got {got}")
    return [str(number) for number in range(len(rows))], rows


def _numbers(values: Array, path: Path, model: TrainedModel) -> Tensor:
    """Return rows of numbers, or one of them, in the model's shape: float32."""
    rows = values if values.ndim > len(model.shape) else values[None]
    try:
        x = check_features(rows, "the array")
    except ValueError as error:
        raise bad_value("INPUT", str(path), f"numbers ({error})") from None
    if tuple(x.shape[1:]) != model.shape:
        shape = tuple(x.shape[1:])
        raise UserError(f"INPUT {path}: must be rows of shape {model.shape}, got {shape}")
    return x


def _images(values: Array, path: Path) -> Tensor:
    try:
        return check_images(values[None] if values.ndim == 2 else values, "the array")
    except ValueError as error:
        raise bad_value("INPUT", str(path), f"uint8 images ({error})") from None


def _load(path: Path) -> Array:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            return np.asarray(file)
        with file:
            name = next((key for key in ("x", "x_test") if key in file.files), None)
            if name is None:
                names = ", ".join(file.files) or "no arrays"
                raise UserError(f"INPUT {path}: must contain an array x or x_test, got {names}")
            return np.asarray(file[name])
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise bad_value("INPUT", str(path), f"a file that can be read ({error})") from None


def _fitted(images: Tensor, path: Path, model: TrainedModel) -> Tensor:
    """Return the images in the model's shape; resized only if the training data was."""
    shape = tuple(images.shape[1:])
    if shape == model.shape:
        return images
    if model.config.data.size or (model.config.data.channels and shape[1:] == model.shape[1:]):
        log.info("%s: images of %s resized to %s, as in training", path, shape, model.shape)
        return fit_images(images, model.shape)
    raise UserError(
        f"INPUT {path}: must be images of shape {model.shape} (channels, height, width), "
        f"since the model was trained on it, got {shape}"
    )
