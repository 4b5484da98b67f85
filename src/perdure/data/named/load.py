"""Data sets by name: where they are looked for, and how what is found is read."""

from __future__ import annotations

import logging
from pathlib import Path

from perdure.config import (
    DATA_SETS,
    DataConfig,
    FolderData,
    NamedData,
    NpzData,
    TextData,
    change_source,
)
from perdure.core.errors import UserError
from perdure.data.named.download import Unavailable, download
from perdure.data.named.files import (
    data_folder,
    file_names,
    find_cached,
    store,
    suffix,
)
from perdure.data.named.official import READERS, find_official, read_official
from perdure.data.source import ConfigLocation

log = logging.getLogger(__name__)


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
    """Return the file or folder that holds a set here, or None.

    Args:
        name: Name of the set.
        size: Pixels of the images that are asked for; a file of that size comes first.
    """
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
