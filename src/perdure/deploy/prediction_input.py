"""Reading files to predict on: arrays, images, texts and tables.

Images are resized only if those of the training data were. Bad rows (an image or a line that cannot
be read, NaN) are refused, or left out with a warning that names each.
"""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perdure.core.documents import json_value
from perdure.core.errors import UserError, bad_value
from perdure.data.examples import Array, Text
from perdure.data.images import fit_images
from perdure.data.source import ConfigLocation, check_features, check_images
from perdure.data.sources.image_folder import SUFFIXES, FolderData, Opener, decode_images
from perdure.data.sources.table import TABLE_SUFFIXES, TableFile
from perdure.data.sources.text import read_lines, text_of
from perdure.deploy.trained_model import TrainedModel

log = logging.getLogger(__name__)

NamedRows = tuple[list[str], Tensor]
_ARRAYS = (".npy", ".npz")
_TEXTS = (".txt", ".jsonl", ".jsonl.gz")


def read_input(path: Path, model: TrainedModel, skip_bad: bool = False) -> NamedRows:
    """Read a file or a folder of images for prediction.

    Returns:
        The names of the examples, and the examples as the model's inputs: [N, *shape].

    Raises:
        UserError: The file cannot be read or does not fit the model.

    """
    if path.is_dir():
        return _folder(path, model, skip_bad)
    if not path.is_file():
        raise bad_value("INPUT", str(path), "a file or a folder that exists")
    if path.suffix.lower() in _ARRAYS:
        return _array(path, model, skip_bad)
    if path.name.lower().endswith(TABLE_SUFFIXES):
        return _table(path, model, skip_bad)
    if path.suffix.lower() in SUFFIXES:
        return [path.name], _image(path, model)
    if len(model.shape) == 3:
        raise bad_value("INPUT", str(path), "a .npy or .npz file, an image or a folder of images")
    if path.name.lower().endswith(_TEXTS):
        return _texts(path, model, skip_bad)
    raise bad_value("INPUT", str(path), "a .npy or .npz file, or texts in .txt or .jsonl")


def _table(path: Path, model: TrainedModel, skip_bad: bool) -> NamedRows:
    """Read the columns of a table that the model was trained on; other columns are not used."""
    if model.feature_names is None:
        raise bad_value("INPUT", str(path), "no table, since the model was not trained on one")
    delimiter = getattr(model.config.data, "delimiter", ",")
    try:
        values, _ = TableFile(path, delimiter, "INPUT", skip_bad).read(model.feature_names, [])
    except ValueError as error:
        raise bad_value("INPUT", str(path), f"a valid table ({error})") from None
    return _finite_rows(path, torch.from_numpy(values).float())


def _texts(path: Path, model: TrainedModel, skip_bad: bool) -> NamedRows:
    """Read one text per line, or the text column of JSON lines."""
    try:
        lines = [line.rstrip("\n") for line in read_lines(path) if line.strip()]
    except ValueError as error:
        raise bad_value("INPUT", str(path), f"texts that can be read ({error})") from None
    plain = path.name.lower().endswith(".txt")
    column = getattr(model.config.data, "text_column", "text")
    texts: dict[str, Text] = {}
    for number, line in enumerate(lines):
        with _skipping(skip_bad):
            texts[str(number)] = line if plain else _json_text(line, column, path, number)
    if not texts:
        raise bad_value("INPUT", str(path), "a file with at least one text")
    return list(texts), model.text_rows(list(texts.values()))


def _json_text(line: str, column: str | list[str], path: Path, number: int) -> Text:
    try:
        return text_of(json_value(line), column)
    except (ValueError, KeyError, TypeError) as error:
        expected = f"texts that can be read (row {number}: {error})"
        raise bad_value("INPUT", str(path), expected) from None


def _folder(path: Path, model: TrainedModel, skip_bad: bool) -> NamedRows:
    files = sorted(p for p in path.iterdir() if p.is_file() and p.suffix.lower() in SUFFIXES)
    images = {}
    for file in files:
        with _skipping(skip_bad):
            images[file.name] = _image(file, model)
    if not images:
        expected = "a folder that holds images"
        raise bad_value("INPUT", str(path), expected + (" that can be read" if files else ""))
    return list(images), torch.cat(list(images.values()))


@contextmanager
def _skipping(skip_bad: bool) -> Iterator[None]:
    """Turn an error into a warning, if bad rows are skipped."""
    try:
        yield
    except UserError as error:
        if not skip_bad:
            raise
        log.warning("%s: skipped", error)


def _finite_rows(path: Path, rows: Tensor) -> NamedRows:
    """Return rows of numbers with their positions, without those that are not finite."""
    finite = torch.isfinite(rows).flatten(1).all(1)
    for number in torch.nonzero(~finite)[:, 0].tolist():
        log.warning("INPUT %s: row %d is not of finite numbers: skipped", path, number)
    if not finite.any():
        raise bad_value("INPUT", str(path), "a file with at least one row of finite numbers")
    return [str(number) for number in torch.nonzero(finite)[:, 0].tolist()], rows[finite]


def _image(path: Path, model: TrainedModel) -> Tensor:
    return _fitted(decode_image(lambda: Image.open(path), str(path), model), path, model)


def decode_image(opener: Opener, name: str, model: TrainedModel) -> Tensor:
    """Return an image with the channels of a model's inputs, uint8 [1, C, H, W].

    Raises:
        UserError: The image cannot be decoded, or the model takes no images.

    """
    if len(model.shape) != 3 or model.dtype != torch.uint8:
        expected = f"an array, since the model takes rows of {model.shape} numbers"
        raise bad_value("INPUT", name, expected)
    config = FolderData(path=name, channels=1 if model.shape[0] == 1 else 3)
    return decode_images([opener], [name], config, ConfigLocation("INPUT"))


def _array(path: Path, model: TrainedModel, skip_bad: bool) -> NamedRows:
    values = _load(path)
    if model.dtype == torch.float32:
        return _finite_rows(path, _numbers(values, path, model, skip_bad))
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


def _numbers(values: Array, path: Path, model: TrainedModel, allow_nan: bool) -> Tensor:
    """Return rows of numbers, or one of them, in the model's shape: float32."""
    rows = values if values.ndim > len(model.shape) else values[None]
    try:
        x = check_features(rows, "the array", allow_nan)
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
