"""Image files and folders of them, read into one uint8 array."""

from __future__ import annotations

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
from perdure.core.rng import Rng
from perdure.data.resize import fit
from perdure.data.source import ConfigLocation, Examples, Source, stratified

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
_GREY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L")
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


def load_folder(config: DataConfig, rng: Rng, place: ConfigLocation) -> Source:
    """A folder a class, below train/ and test/ or, without these, with a seeded split."""
    return _load(_root(config, place), config, rng, place, None)


def load_folder_domains(config: DataConfig, rng: Rng, place: ConfigLocation) -> list[Source]:
    """A folder a domain, each with a folder a class; a class may be missing in some domains."""
    root = _root(config, place)
    domains = _folders(root)
    classes = sorted({name for domain in domains for name in _class_names(domain)})
    if not domains or not classes:
        raise place.error("path", root, "folders of the form domain/class/image")
    return [
        _load(domain, config, rng, replace(place, number=number), classes)
        for number, domain in enumerate(domains)
    ]


def _root(config: DataConfig, place: ConfigLocation) -> Path:
    root = Path(config.path or "")
    if not root.is_dir():
        raise place.error("path", root, "a folder that exists")
    return root


def _load(
    root: Path, config: DataConfig, rng: Rng, place: ConfigLocation, classes: list[str] | None
) -> Source:
    names = classes or _class_names(root)
    if not _is_split(root):
        files, labels = _files(root, names, place)
        rows = _examples(files, labels, config, place)
        generator = rng.numpy_generator("holdout", place.number)
        train, test = stratified(np.array(labels), config.test_fraction, generator)
        if not len(test):
            raise place.error("path", root, "two images or more in some class, to test on one")
        return Source(root.name, rows.take(train), rows.take(test), tuple(names))
    found = [_files(root / part, names, place) for part in ("train", "test")]
    rows = _examples(found[0][0] + found[1][0], found[0][1] + found[1][1], config, place)
    cut = len(found[0][0])
    train_rows, test_rows = (
        Examples(rows.x[:cut], rows.y[:cut]),
        Examples(rows.x[cut:], rows.y[cut:]),
    )
    return Source(root.name, train_rows, test_rows, tuple(names))


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _is_split(root: Path) -> bool:
    return (root / "train").is_dir() and (root / "test").is_dir()


def _class_names(root: Path) -> list[str]:
    parts = [root / "train", root / "test"] if _is_split(root) else [root]
    return sorted({folder.name for part in parts for folder in _folders(part)})


def _files(root: Path, names: list[str], place: ConfigLocation) -> tuple[list[Path], list[int]]:
    """The images below a folder and their labels, in the order of their names."""
    files, labels = [], []
    for label, name in enumerate(names):
        folder = root / name
        found = sorted(_images(folder)) if folder.is_dir() else []
        files += found
        labels += [label] * len(found)
    if not files:
        allowed = "a folder of class folders with images (domain/class needs stream.kind domains)"
        raise place.error("path", root, allowed)
    return files, labels


def _images(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]


def _examples(
    files: Sequence[Path], labels: Sequence[int], config: DataConfig, place: ConfigLocation
) -> Examples:
    openers: list[Opener] = [_opener(path) for path in files]
    x = pack(openers, [str(path) for path in files], config, place)
    return Examples(x, torch.tensor(labels, dtype=torch.int64))


def _opener(path: Path) -> Opener:
    return lambda: Image.open(path)


def pack(
    openers: Sequence[Opener], names: Sequence[str], config: DataConfig, place: ConfigLocation
) -> Tensor:
    """All images as one uint8 [N, C, H, W], each decoded straight into its place.

    They are opened twice: first for their sizes and colours, so that one array can be made.
    """
    size, grey = _survey(openers, names, config, place)
    channels = config.channels or (1 if grey else 3)
    out = torch.empty((len(openers), channels, size[1], size[0]), dtype=torch.uint8)
    for place_in_out, (opener, name) in enumerate(zip(openers, names, strict=True)):
        with _opened(opener, name, place) as image:
            pixels = _decoded(image, channels, name, place)
        out[place_in_out] = fit(pixels[None], tuple(out.shape[1:]))[0]
    return out


def _survey(
    openers: Sequence[Opener], names: Sequence[str], config: DataConfig, place: ConfigLocation
) -> tuple[tuple[int, int], bool]:
    """The (width, height) that all images get, and whether all are grey."""
    sizes: dict[tuple[int, int], str] = {}
    grey = True
    for opener, name in zip(openers, names, strict=True):
        with _opened(opener, name, place) as image:
            sizes.setdefault(image.size, name)
            grey = grey and image.mode in _GREY
    if config.size:
        return (config.size, config.size), grey
    if len(sizes) > 1:
        said = ", ".join(f"{w}x{h} ({Path(name).name})" for (w, h), name in list(sizes.items())[:3])
        raise place.error("size", None, f"a number of pixels, since images differ in size: {said}")
    return next(iter(sizes)), grey


def _opened(opener: Opener, name: str, place: ConfigLocation) -> Image.Image:
    try:
        return opener()
    except _UNREADABLE as error:
        raise place.error("path", name, f"an image that can be read ({error})") from None


def _decoded(image: Image.Image, channels: int, name: str, place: ConfigLocation) -> Tensor:
    """One image as uint8 [C, H, W]."""
    try:
        if image.mode.startswith("I"):  # 16 bits a pixel: Pillow's own conversion would clip
            values = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
            image = Image.fromarray(values)
        pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    except _UNREADABLE as error:
        raise place.error("path", name, f"an image that can be read ({error})") from None
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)
