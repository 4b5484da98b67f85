"""The file format of MNIST: idx files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from perdure.config import IdxData
from perdure.data.checks import check_classes, check_images, check_labels
from perdure.data.source import Array, ConfigLocation, Examples, Source

_UNSIGNED_BYTE = 0x08
_NAME = re.compile(r"((?:.*-)?)(train|t10k|test)-(images|labels)[-.]idx\d-ubyte(?:\.gz)?")


def load_idx(config: IdxData, location: ConfigLocation) -> Source:
    """Load a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte and those of t10k."""
    folder = Path(config.path)
    if not folder.is_dir():
        raise location.error("path", folder, "a folder with idx files that exists")
    files = find_idx(folder)
    for split in ("train", "t10k"):
        for content, dimensions in (("images", 3), ("labels", 1)):
            if (split, content) not in files:
                name = f"{split}-{content}-idx{dimensions}-ubyte"
                raise location.error("path", folder, f"a folder with {name}")
    try:
        return _source(folder.name, {key: read_idx(path) for key, path in files.items()})
    except ValueError as error:
        raise location.error("path", folder, f"a folder with valid idx files ({error})") from None


def find_idx(folder: Path, prefix: str | None = None) -> dict[tuple[str, str], Path]:
    """Return idx files by split (train or t10k) and content (images or labels).

    Args:
        folder: Where they lie. Of two equal ones that which is not gzipped is returned.
        prefix: What their names begin with, before the split. If None, anything.
    """
    files: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir(), key=lambda p: (len(p.name), p.name)):
        match = _NAME.fullmatch(path.name)
        if match and path.is_file() and prefix in (None, match[1]):
            split = "train" if match[2] == "train" else "t10k"
            files.setdefault((split, match[3]), path)
    return files


def _source(name: str, arrays: dict[tuple[str, str], Array]) -> Source:
    x, x_test = arrays["train", "images"], arrays["t10k", "images"]
    if x.shape[1:] != x_test.shape[1:]:
        raise ValueError(f"training images of {x.shape[1:]}, test images of {x_test.shape[1:]}")
    images, test_images = check_images(x, "train-images"), check_images(x_test, "t10k-images")
    y = check_labels(arrays["train", "labels"], len(x), "train-labels")
    y_test = check_labels(arrays["t10k", "labels"], len(x_test), "t10k-labels")
    classes = check_classes(y, y_test, None)
    train = Examples(images, torch.from_numpy(y))
    return Source(name, train, Examples(test_images, torch.from_numpy(y_test)), classes)


def read_idx(path: Path) -> Array:
    """Return the array in an idx file of unsigned bytes; ValueError if it is not one."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTE:
        raise ValueError(f"{path.name} does not begin like an idx file of unsigned bytes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError(f"{path.name} ends within its header")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise ValueError(f"{path.name} has {len(data) - start} bytes for shape {shape}")
    # a copy, since an array over bytes cannot be written to, which torch warns about
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()
