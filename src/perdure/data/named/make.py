"""Making the file of a data set from its official files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perdure.config import DATA_SETS, DataSet, FolderData
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.named.files import source_arrays, store, suffix, write_set
from perdure.data.named.official import READERS, Arrays, read_official
from perdure.data.named.texts import Rows
from perdure.data.named_arrays import array_rows
from perdure.data.readers.image_folder import load_folder, load_folder_domains
from perdure.data.rows import Reading, rows_source
from perdure.data.source import ConfigLocation

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

    Args:
        name: Name of the set.
        folder: The folder with the official files.
        out: File to write. If None, it is written to the cache.
        size: Pixels to which the images of class and domain folders are resized. If None, all must
            have one size.
        test_fraction: Fraction held out for testing, of folders without test/.

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


def _content(name: str, folder: Path, size: int | None, test_fraction: float) -> Arrays | Rows:
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
