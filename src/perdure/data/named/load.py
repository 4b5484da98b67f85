"""Data sets by name: where they are looked for, and files made from official ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from perdure.config import DataConfig, change_source
from perdure.config.section import OpenFraction, PositiveInt, Text
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.examples import Source
from perdure.data.named.files import (
    Unavailable,
    data_folder,
    download,
    file_names,
    find_cached,
    source_arrays,
    store,
    suffix,
    write_set,
)
from perdure.data.named.official import READERS, Arrays, TextRows, find_official, read_official
from perdure.data.named.sets import DATA_SETS, DataSet
from perdure.data.rows import Reading, rows_source
from perdure.data.source import ConfigLocation
from perdure.data.sources.arrays import NpzData, array_rows
from perdure.data.sources.image_folder import FolderData, load_folder, load_folder_domains
from perdure.data.sources.text import TextData

# ---- Making the file of a data set from its official files

_OPTIONS = {"path": "--from", "size": "--size"}


@dataclass(frozen=True)
class _OptionLocation(ConfigLocation):
    """Names options of the command in place of config keys."""

    def error(self, key: str, value: object, expected: str) -> UserError:
        """Return the error for a bad value."""
        return bad_value(_OPTIONS.get(key, key), str(value), expected)


def make_set(
    name: str,
    folder: Path,
    out: Path | None = None,
    size: int | None = None,
    test_fraction: float = 0.2,
) -> Path:
    """Write the file of a data set, made from its official files, and return it.

    Raises:
        UserError: The name is unknown, or the files are missing, damaged or others.

    """
    if name not in DATA_SETS:
        raise bad_value("NAME", name, f"one of {', '.join(DATA_SETS)}")
    if not folder.is_dir():
        raise bad_value("--from", str(folder), "a folder that exists")
    _check_out(out, suffix(name))
    content = _content(name, folder, size, test_fraction)
    if out is None:
        is_folder = DATA_SETS[name].official.format not in READERS
        return store(name, size if is_folder else None, content)
    write_set(out, content)
    return out


def _check_out(out: Path | None, end: str) -> None:
    if out is not None and (not out.name.endswith(end) or out.exists()):
        raise bad_value("--out", str(out), f"a new file whose name ends in {end}")
    if out is not None and not out.parent.is_dir():
        raise bad_value("--out", str(out), "a file in a folder that exists")


def _content(name: str, folder: Path, size: int | None, test_fraction: float) -> Arrays | TextRows:
    data_set = DATA_SETS[name]
    if data_set.official.format not in READERS:
        return _from_images(data_set, folder, size, test_fraction)
    if size is not None:
        raise bad_value("--size", size, f"omitted for {name}, whose images have one size")
    try:
        content = read_official(folder, data_set)
        if isinstance(content, dict):
            rows = array_rows(content, ConfigLocation())
            rows_source(name, rows, Reading(Rng(0)))  # which refuses arrays that do not fit
    except ValueError as error:
        expected = f"a folder with {data_set.official.files} ({error})"
        raise bad_value("--from", str(folder), expected) from None
    return content


def _from_images(data_set: DataSet, folder: Path, size: int | None, fraction: float) -> Arrays:
    """Return the arrays of class or domain folders; a missing test split is drawn with seed 0."""
    inner = next((folder / f for f in data_set.official.folders if (folder / f).is_dir()), folder)
    config = FolderData(path=str(inner), size=size, test_fraction=fraction)
    location = _OptionLocation()
    if data_set.official.format == "domains":
        return source_arrays(load_folder_domains(config, Rng(0), location), is_domains=True)
    return source_arrays([load_folder(config, Rng(0), location)])


# ---- Data sets by name: where they are looked for, and how what is found is read

log = logging.getLogger(__name__)


class NamedData(DataConfig):
    """A known data set by its name; see `perdure data list`.

    Its files are looked for in the folder that the environment variable PERDURE_DATA names (or else
    in data/) and in the cache; else it is downloaded once, with Hugging Face's datasets or with
    torchvision.

    Example: `data: {source: cifar100}`
    """

    has_name: ClassVar[bool] = True
    path: Text | None = None
    """A file (.npz or .jsonl.gz) or a folder that holds the set. Default: it is looked for."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if the set has no test split."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Load the set from its file or folder, under its name."""
        source = resolve_named(self, location).load(rng, location)
        assert isinstance(source, Source)
        return replace(source, name=self.source)

    def load_domains(self, rng: Rng, location: ConfigLocation) -> list[Source]:
        """Load one source per domain of its file or folder."""
        return resolve_named(self, location).load_domains(rng, location)


def resolve_named(config: NamedData, location: ConfigLocation) -> DataConfig:
    """Return the section that reads the file or folder of a named set.

    It is `data.path` if that is given. Else it is looked for in the folder of PERDURE_DATA and in
    the cache, and downloaded to the cache if it is in neither. Official files are converted to the
    cache.

    Raises:
        UserError: It cannot be had; the sentence names the file that would do.

    """
    path = _given(config, location) or find_set(config.source, config.size)
    path = path or _downloaded(config, location)
    if path.is_dir() and DATA_SETS[config.source].official.format in READERS:
        path = _converted(config, path, location)
    log.info("%s: %s is read from %s", location.key, config.source, path)
    return _section(config, path)


def _section(config: NamedData, path: Path) -> DataConfig:
    """Return the section that reads a file (npz or JSON lines) or a folder of images."""
    source: DataConfig
    if path.is_dir():
        source = FolderData(path=str(path))
    elif DATA_SETS[config.source].is_text:
        source = TextData(path=str(path))
    else:
        source = NpzData(path=str(path))
    return change_source(config, source)


def _given(config: NamedData, location: ConfigLocation) -> Path | None:
    path = None if config.path is None else Path(config.path)
    if path is not None and not path.exists():
        raise location.error("path", path, "a file or folder that exists")
    return path


def find_set(name: str, size: int | None = None) -> Path | None:
    """Return the file or folder that holds a set here, or None."""
    return find_file(name, size) or find_cached(name, size) or _find_folder(name)


def find_file(name: str, size: int | None) -> Path | None:
    """Return the file of a set in the folder of PERDURE_DATA, or None."""
    root = data_folder()
    paths = [] if root is None else [root / file for file in file_names(name, size)]
    return next((path for path in paths if path.is_file()), None)


def _find_folder(name: str) -> Path | None:
    """Return the folder below PERDURE_DATA with the official files of a set, or None."""
    root, data_set = data_folder(), DATA_SETS[name]
    if root is None:
        return None
    official = data_set.official
    folders = [root / name, root / name.replace("-", "_"), *(root / f for f in official.folders)]
    if official.format not in READERS:
        return next((folder for folder in folders if folder.is_dir()), None)
    folders += [root] if official.is_distinct else []
    found = (find_official(folder, data_set) for folder in folders)
    return next(filter(None, found), None)


def _converted(config: NamedData, path: Path, location: ConfigLocation) -> Path:
    """Return the file in the cache that is made from official files."""
    data_set = DATA_SETS[config.source]
    try:
        return store(config.source, None, read_official(path, data_set))
    except ValueError as error:
        expected = f"a folder with {data_set.official.files} ({error})"
        raise location.error("path", path, expected) from None


def _downloaded(config: NamedData, location: ConfigLocation) -> Path:
    """Return the file in the cache that is made from a download."""
    name, data_set = config.source, DATA_SETS[config.source]
    size = config.size if data_set.official.format in ("classes", "domains") else None
    log.info("%s: %s is looked for on the web", location.key, name)
    try:
        return store(name, size, download(data_set, config, location))
    except Unavailable as error:
        raise UserError(f"{location.key}.source: {_missing(name, str(error))}") from None


def _missing(name: str, reasons: str) -> str:
    """Return what to do about a set that is not here and cannot be downloaded."""
    root, data_set = data_folder(), DATA_SETS[name]
    file = f"{name}{suffix(name)}"
    put = f"put {file} in {root}" if root else f"set PERDURE_DATA to a folder with {file}"
    return (
        f"{name} could not be loaded ({reasons}): {put}, or run `perdure data make {name} --from "
        f"FOLDER` on {data_set.official.files} ({data_set.official.url})"
    )
