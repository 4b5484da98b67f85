"""Image files, folders of them by class, and folders of which the first level names the client."""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perdure.config import DataConfig
from perdure.config.section import OpenFraction, Text
from perdure.core.rng import Rng
from perdure.data.clients import with_clients
from perdure.data.examples import Examples, Source
from perdure.data.images import fit_images
from perdure.data.rows import stratified_split
from perdure.data.source import ConfigLocation

# ---- Image files, and folders of them

log = logging.getLogger(__name__)

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
_GRAY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L")
_UNREADABLE = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

Opener = Callable[[], Image.Image]
"""Opens one image."""


class FolderData(DataConfig):
    """Image files in one folder per class.

    Example: `data: {source: folder, path: pacs, size: 224, channels: 3}`
    """

    path: Text
    """The folder: class/image, train/class/image and test/class/image, or domain/class/image."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if there is no test/ folder."""

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Load the images, with the client of each if every client has a folder."""
        if location.in_client_folders:
            return load_client_folders(self, rng, location)
        return load_folder(self, rng, location)

    def load_domains(self, rng: Rng, location: ConfigLocation) -> list[Source]:
        """Load one source per folder of a domain."""
        if location.in_client_folders:
            return load_client_domains(self, rng, location)
        return load_folder_domains(self, rng, location)


def load_folder(config: FolderData, rng: Rng, location: ConfigLocation) -> Source:
    """Load one folder per class, from train/ and test/ or else split with the seed."""
    return _load(find_root(config, location), config, rng, location, None)


def load_folder_domains(config: FolderData, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load one folder per domain, each as `load_folder`; a domain may lack some of the classes."""
    root = find_root(config, location)
    domains = sorted_folders(root)
    classes = sorted({name for domain in domains for name in class_folders(domain)})
    if not domains or not classes:
        raise location.error("path", root, "folders of the form domain/class/image")
    return [
        _load(domain, config, rng, replace(location, number=number), classes)
        for number, domain in enumerate(domains)
    ]


def find_root(config: FolderData, location: ConfigLocation) -> Path:
    """Return the folder of a source; UserError if it does not exist."""
    root = Path(config.path)
    if not root.is_dir():
        raise location.error("path", root, "a folder that exists")
    return root


def _load(
    root: Path, config: FolderData, rng: Rng, location: ConfigLocation, classes: list[str] | None
) -> Source:
    names = classes or class_folders(root)
    if not _is_split(root):
        files, labels = list_images(root, names, location)
        rows = _examples(files, labels, config, location)
        generator = rng.numpy_generator("holdout", location.number)
        train, test = stratified_split(np.array(labels), config.test_fraction, generator)
        if not len(test):
            raise location.error("path", root, "two images or more in some class, to test on one")
        return Source(root.name, rows.select(train), rows.select(test), tuple(names))
    files, labels = list_images(root / "train", names, location)
    test_files, test_labels = list_images(root / "test", names, location)
    unseen = sorted({*test_labels} - {*labels}) if classes is None and not location.is_node else []
    if unseen:
        expected = f"a folder whose classes all have images in train/ (not {names[unseen[0]]!r})"
        raise location.error("path", root, expected)
    rows, count = _examples(files + test_files, labels + test_labels, config, location), len(files)
    train_rows = Examples(rows.x[:count], rows.y[:count])
    test_rows = Examples(rows.x[count:], rows.y[count:])
    return Source(root.name, train_rows, test_rows, tuple(names))


def split_images(
    root: Path,
    names: list[str],
    config: FolderData,
    generator: np.random.Generator,
    location: ConfigLocation,
) -> tuple[list[Path], list[int], list[bool]]:
    """Return the images of class folders, their labels, and whether they are test data.

    They are those of train/ and test/, or else split at random.
    """
    if _is_split(root):
        train, test = (list_images(root / part, names, location) for part in ("train", "test"))
        is_test = [False] * len(train[0]) + [True] * len(test[0])
        return train[0] + test[0], train[1] + test[1], is_test
    files, labels = list_images(root, names, location)
    held_out = set(stratified_split(np.array(labels), config.test_fraction, generator)[1].tolist())
    return files, labels, [row in held_out for row in range(len(files))]


def sorted_folders(root: Path) -> list[Path]:
    """Return the folders in a folder, without hidden ones and those that archivers add."""
    return sorted(
        p for p in root.iterdir() if p.is_dir() and not p.name.startswith((".", "__MACOSX"))
    )


def _is_split(root: Path) -> bool:
    return (root / "train").is_dir() and (root / "test").is_dir()


def class_folders(root: Path) -> list[str]:
    """Return the names of the classes below a folder, of train/ and test/ together.

    Folders without images are left out, and the log names them.
    """
    parts = [root / "train", root / "test"] if _is_split(root) else [root]
    folders = [folder for part in parts for folder in sorted_folders(part)]
    names = {folder.name for folder in folders if _images(folder)}
    empty = sorted({folder.name for folder in folders} - names)
    if names and empty:
        log.warning("%s: class folders without images are left out: %s", root, ", ".join(empty))
    return sorted(names)


def list_images(
    root: Path, names: list[str], location: ConfigLocation
) -> tuple[list[Path], list[int]]:
    """Return the images below a folder and their labels, in the order of their names."""
    files, labels = [], []
    for label, name in enumerate(names):
        folder = root / name
        images = sorted(_images(folder)) if folder.is_dir() else []
        files += images
        labels += [label] * len(images)
    if not files:
        expected = "a folder of class folders with images (domain/class needs stream.kind domains)"
        raise location.error("path", root, expected)
    return files, labels


def _images(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]


def _examples(
    files: Sequence[Path], labels: Sequence[int], config: FolderData, location: ConfigLocation
) -> Examples:
    x = decode_files(files, config, location)
    return Examples(x, torch.tensor(labels, dtype=torch.int64))


def decode_files(files: Sequence[Path], config: FolderData, location: ConfigLocation) -> Tensor:
    """Decode image files as `decode_images` does."""
    openers: list[Opener] = [_opener(path) for path in files]
    return decode_images(openers, [str(path) for path in files], config, location)


def _opener(path: Path) -> Opener:
    return lambda: Image.open(path)


def decode_images(
    openers: Sequence[Opener], names: Sequence[str], config: DataConfig, location: ConfigLocation
) -> Tensor:
    """Decode images into one array.

    Every image is opened twice: first for its size and color, so that one array can be allocated.

    Returns:
        uint8 [N, C, H, W]. One channel if all images are gray and `channels` is not set.

    Raises:
        UserError: An image cannot be read, or they differ in size and `size` is not set.

    """
    size, all_gray = _survey(openers, names, config, location)
    channels = config.channels or (1 if all_gray else 3)
    out = torch.empty((len(openers), channels, size[1], size[0]), dtype=torch.uint8)
    for index, (opener, name) in enumerate(zip(openers, names, strict=True)):
        with _opened(opener, name, location) as image:
            pixels = _decoded(image, channels, name, location)
        out[index] = fit_images(pixels[None], tuple(out.shape[1:]))[0]
    return out


def _survey(
    openers: Sequence[Opener], names: Sequence[str], config: DataConfig, location: ConfigLocation
) -> tuple[tuple[int, int], bool]:
    """Return the (width, height) of the decoded images, and whether all images are gray."""
    sizes: dict[tuple[int, int], str] = {}
    all_gray = True
    for opener, name in zip(openers, names, strict=True):
        with _opened(opener, name, location) as image:
            sizes.setdefault(image.size, name)
            all_gray = all_gray and image.mode in _GRAY
    if config.size:
        return (config.size, config.size), all_gray
    if len(sizes) > 1:
        shown = [f"{w}x{h} ({Path(name).name})" for (w, h), name in list(sizes.items())[:3]]
        expected = f"a number of pixels, since images differ in size: {', '.join(shown)}"
        raise location.error("size", None, expected)
    return next(iter(sizes)), all_gray


def _opened(opener: Opener, name: str, location: ConfigLocation) -> Image.Image:
    try:
        return opener()
    except _UNREADABLE as error:
        raise location.error("path", name, f"an image that can be read ({error})") from None


def _decoded(image: Image.Image, channels: int, name: str, location: ConfigLocation) -> Tensor:
    """Return one image as uint8 [C, H, W]."""
    try:
        if image.mode.startswith("I"):  # 16 bits per pixel, which Pillow's conversion would clip
            values = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
            image = Image.fromarray(values)
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    except _UNREADABLE as error:
        raise location.error("path", name, f"an image that can be read ({error})") from None
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)


# ---- Folders of images in which the first level names the client


def load_client_folders(config: FolderData, rng: Rng, location: ConfigLocation) -> Source:
    """Load client/class/image, each client as `load_folder` does, as one source."""
    root = find_root(config, location)
    clients = sorted_folders(root)
    classes = sorted({name for client in clients for name in class_folders(client)})
    if not classes:
        raise location.error("path", root, "folders of the form client/class/image")
    return _load_clients(root.name, {c.name: c for c in clients}, classes, config, rng, location)


def load_client_domains(config: FolderData, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load client/domain/class/image as one source per domain, in the order of their names."""
    root = find_root(config, location)
    folders = [domain for client in sorted_folders(root) for domain in sorted_folders(client)]
    classes = sorted({name for folder in folders for name in class_folders(folder)})
    if not classes:
        raise location.error("path", root, "folders of the form client/domain/class/image")
    return [
        _load_clients(
            name, {f.parent.name: f for f in folders if f.name == name}, classes, config, rng,
            replace(location, number=number),
        )
        for number, name in enumerate(sorted({folder.name for folder in folders}))
    ]  # fmt: skip


def _load_clients(
    name: str,
    folders: dict[str, Path],
    classes: list[str],
    config: FolderData,
    rng: Rng,
    location: ConfigLocation,
) -> Source:
    """Return the images in the folders of several clients, decoded together."""
    files: list[Path] = []
    labels: list[int] = []
    owners: list[str] = []
    is_test: list[bool] = []
    generator = rng.numpy_generator("holdout", location.number)
    for client, folder in folders.items():
        images, of_images, held_out = split_images(folder, classes, config, generator, location)
        files, labels, is_test = files + images, labels + of_images, is_test + held_out
        owners += [client] * len(images)
    x = decode_files(files, config, location)
    rows, test = Examples(x, torch.tensor(labels, dtype=torch.int64)), np.array(is_test)
    if test.all() or not test.any():
        raise location.error("path", config.path, f"images to train and to test on in {name}")
    parts = [np.flatnonzero(~test), np.flatnonzero(test)]
    source = Source(name, rows.select(parts[0]), rows.select(parts[1]), tuple(classes))
    names = [[owners[row] for row in part] for part in parts]
    return with_clients(source, names[0], names[1])
