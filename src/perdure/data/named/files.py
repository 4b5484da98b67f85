"""Files of data sets: their names, the cache, and downloads from a hub or torchvision."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from perdure.core.files import atomic_file, sha256_file
from perdure.core.registry import is_installed
from perdure.core.rng import Rng
from perdure.data.examples import Array, Source
from perdure.data.named.official import Arrays, TextRows, with_classes
from perdure.data.named.sets import DATA_SETS, DataSet, Hub, Torchvision
from perdure.data.partition_kinds import ColumnPartition
from perdure.data.rows import Reading, rows_source
from perdure.data.source import ConfigLocation
from perdure.data.sources.huggingface import (
    HuggingfaceData,
    column_strings,
    dataset_rows,
    is_reachable,
    read_dataset,
)
from perdure.models.adapter.build import import_library

if TYPE_CHECKING:
    from perdure.data.named.load import NamedData

# ---- Files with data sets: their names, the cache, and how they are written

log = logging.getLogger(__name__)
_DIGITS = 32
_HASHED = re.compile(rf"-[0-9a-f]{{{_DIGITS}}}")


def data_folder() -> Path | None:
    """Return the folder that PERDURE_DATA names, or else data/ in the working folder.

    None if the variable is not set and there is no such folder.
    """
    value = os.environ.get("PERDURE_DATA")
    folder = Path(value or "data")
    return folder if value or folder.is_dir() else None


def cache_folder() -> Path:
    """Return the folder of converted data sets, which PERDURE_CACHE moves."""
    value = os.environ.get("PERDURE_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(value) if value else home / "perdure" / "data"


def suffix(name: str) -> str:
    """Return the suffix of the file that holds a set."""
    return ".jsonl.gz" if DATA_SETS[name].is_text else ".npz"


def file_names(name: str, size: int | None) -> Iterator[str]:
    """Yield the names of files that may hold a set, the best first."""
    bases = [name, name.replace("-", "_"), *DATA_SETS[name].other_names]
    sized = [f"{base}_{size}" for base in bases] if size else []
    ends = (".jsonl.gz", ".jsonl") if DATA_SETS[name].is_text else (".npz",)
    yield from dict.fromkeys(base + end for base in (*sized, *bases) for end in ends)


def find_cached(name: str, size: int | None) -> Path | None:
    """Return the file of a set in the cache, or None; a damaged one counts as missing."""
    folder, end = cache_folder(), suffix(name)
    for stem in ([f"{name}_{size}"] if size else []) + [name]:
        for path in sorted(folder.glob(f"{stem}-*{end}")):
            digest = path.name.removeprefix(stem).removesuffix(end)
            if not _HASHED.fullmatch(digest):
                continue
            if sha256_file(path).startswith(digest[1:]):
                return path
            log.warning("%s: its content does not match its hash; it is not used", path)
    return None


def store(name: str, size: int | None, content: Arrays | TextRows) -> Path:
    """Write a set to the cache and return its file, whose name has the hash of its content."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / f".{name}.{uuid.uuid4().hex[:8]}.new"
    write_set(plain, content)
    stem = f"{name}_{size}" if size else name
    path = folder / f"{stem}-{sha256_file(plain)[:_DIGITS]}{suffix(name)}"
    os.replace(plain, path)
    return path


def write_set(path: Path, content: Arrays | TextRows) -> None:
    """Write arrays as npz or rows as gzipped JSON lines; the file is complete or absent."""
    with atomic_file(path) as file:
        if isinstance(content, dict):
            _write_npz(file, content)
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
            packed.writelines(
                json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in content
            )


def _write_npz(file: BinaryIO, arrays: Arrays) -> None:
    """Write an npz file without the time of day, so that equal arrays make equal files."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.ascontiguousarray(array), allow_pickle=False)


def source_arrays(sources: Sequence[Source], is_domains: bool = False) -> Arrays:
    """Return the arrays of an npz file: of one source, or of domains."""
    if not is_domains:
        (source,) = sources
        by_name = {"train": source.train, "test": source.test}
        arrays = {f"x_{part}": _last(each.x.numpy()) for part, each in by_name.items()}
        arrays |= {f"y_{part}": each.y.numpy() for part, each in by_name.items()}
        return arrays | {"class_names": np.array(source.class_names)}
    parts = [(d, is_test, part) for d, source in enumerate(sources)
             for is_test, part in ((False, source.train), (True, source.test))]  # fmt: skip
    return {
        "x": np.concatenate([_last(part.x.numpy()) for _, _, part in parts]),
        "y": np.concatenate([part.y.numpy() for _, _, part in parts]),
        "domain": np.concatenate([np.full(len(part), d) for d, _, part in parts]),
        "is_test": np.concatenate([np.full(len(part), t) for _, t, part in parts]),
        "domain_names": np.array([source.name for source in sources]),
        "class_names": np.array(sources[0].class_names),
    }


def _last(images: Array) -> Array:
    """Return images [N, C, H, W] with the channels last, without them if they are gray."""
    return images[:, 0] if images.shape[1] == 1 else images.transpose(0, 2, 3, 1)


# ---- Data sets from Hugging Face's hub and from torchvision

_TEST = ("test", "validation", "valid", "val")


class Unavailable(Exception):
    """An origin cannot give a data set; the text says why."""


def download(data_set: DataSet, config: NamedData, location: ConfigLocation) -> Arrays | TextRows:
    """Return the contents of a data set from the first origin that can give it.

    Raises:
        Unavailable: No origin can give it.
        UserError: Images differ in size and the section has none.

    """
    reasons = []
    for origin in (from_hub, from_torchvision):
        try:
            found = origin(data_set, config, location)
        except Unavailable as error:
            reasons.append(str(error))
        else:
            return found
    raise Unavailable("; ".join(reasons))


def from_hub(data_set: DataSet, config: NamedData, location: ConfigLocation) -> Arrays | TextRows:
    """Return a data set of Hugging Face's hub; a test split that it lacks is drawn, seed 0."""
    hub = data_set.hub
    if hub is None:
        raise Unavailable("it is not on Hugging Face's hub")
    if not is_installed("datasets"):
        raise Unavailable("datasets is not installed (pip install 'perdure[huggingface]')")
    settings = HuggingfaceData(
        path=hub.path, subset=hub.subset, image_column=hub.image, label_column=hub.label,
        size=config.size, test_fraction=config.test_fraction,
    )  # fmt: skip
    try:
        data = read_dataset(hub.path, hub.subset)
    except ValueError as error:
        raise Unavailable(f"{hub.path}: {error}") from None
    if hub.text is not None:
        return _rows(data, hub)
    column = ColumnPartition(name=hub.domain) if hub.domain else None
    rows = dataset_rows(data, settings, replace(location, clients=column))
    source = rows_source(config.source, rows, Reading(Rng(0), test_fraction=config.test_fraction))
    arrays = source_arrays(_by_domain(source), hub.domain is not None)
    return with_classes(arrays, data_set.classes)


def _by_domain(source: Source) -> list[Source]:
    """Return one source per domain, which the reader has noted as the client of a row."""
    if source.client_names is None:
        return [source]
    owners = [part.clients.numpy() for part in (source.train, source.test)]  # type: ignore[union-attr]
    return [
        Source(
            name, source.train.select(np.flatnonzero(owners[0] == number)),
            source.test.select(np.flatnonzero(owners[1] == number)), source.class_names,
        )
        for number, name in enumerate(source.client_names)
    ]  # fmt: skip


def _rows(data: Any, hub: Hub) -> TextRows:
    """Return the texts of a DatasetDict."""
    test = next((name for name in _TEST if name in data), None)
    if "train" not in data or test is None or hub.text is None:
        raise Unavailable(f"{hub.path} on Hugging Face's hub has no training and test split")
    return [
        {"text": str(text), "label": label, "split": split}
        for split, part in (("train", data["train"]), ("test", data[test]))
        for text, label in zip(part[hub.text], column_strings(part, hub.label), strict=True)
        if label != hub.without
    ]


def from_torchvision(data_set: DataSet, _: NamedData, __: ConfigLocation) -> Arrays:
    """Return a data set that torchvision downloads, into a folder that is removed again."""
    origin = data_set.torchvision
    if origin is None:
        raise Unavailable("torchvision does not have it")
    if not is_installed("torchvision"):
        raise Unavailable("torchvision is not installed (pip install 'perdure[vision]')")
    try:
        cls = import_library(f"torchvision.datasets.{origin.name}")
    except Exception as error:  # compiled operators that do not fit the installed torch
        raise Unavailable(f"torchvision cannot be imported ({_first_line(error)})") from None
    url = _url(cls)
    if url and not is_reachable(url):
        raise Unavailable(f"{url} does not answer")
    with TemporaryDirectory() as folder:
        return with_classes(read_torchvision(cls, origin, folder, True), data_set.classes)


def _url(cls: Any) -> str | None:
    """Return an address from which a class of torchvision downloads, if it names one."""
    mirrors = getattr(cls, "mirrors", None)
    value = mirrors[-1] if mirrors else getattr(cls, "url", None)
    return value if isinstance(value, str) else None


def read_torchvision(cls: Any, origin: Torchvision, root: str, download: bool) -> Arrays:
    """Return the arrays of a class of torchvision.datasets.

    Raises:
        Unavailable: The files are missing or damaged.

    """
    arrays: Arrays = {}
    for part, arguments in (("train", origin.train), ("test", origin.test)):
        try:
            data = cls(root=root, download=download, **origin.options, **arguments)
        except Exception as error:  # of the network, of archives, of checksums
            raise Unavailable(f"torchvision: {_first_line(error)}") from None
        labels = getattr(data, "targets", None)
        arrays[f"x_{part}"] = _images(np.asarray(data.data), origin.transposed)
        y = np.asarray(data.labels if labels is None else labels, np.int64)
        arrays[f"y_{part}"] = y - origin.first_label
        names = getattr(data, "classes", None)
        if names and origin.first_label == 0:
            arrays["class_names"] = np.array(list(names))
    return arrays


def _images(images: Array, transposed: bool) -> Array:
    """Return images with the channels last and upright."""
    if images.ndim == 4 and images.shape[1] == 3 and images.shape[3] != 3:
        return np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return np.ascontiguousarray(images.swapaxes(1, 2)) if transposed else images


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
