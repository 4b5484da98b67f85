"""Files with data sets: their names, the cache, and how they are written."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from perdure.config import DATA_SETS
from perdure.core.files import atomic_file, sha256_file
from perdure.data.named.official import Arrays
from perdure.data.named.texts import Rows
from perdure.data.source import Array, Source

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
    """Yield the names of files that may hold a set, the best first.

    Args:
        name: Name of the set.
        size: Pixels of the images that are asked for: a file NAME_SIZE.npz holds these.
    """
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


def store(name: str, size: int | None, content: Arrays | Rows) -> Path:
    """Write a set to the cache and return its file, whose name has the hash of its content."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / f".{name}.{uuid.uuid4().hex[:8]}.new"
    write_set(plain, content)
    stem = f"{name}_{size}" if size else name
    path = folder / f"{stem}-{sha256_file(plain)[:_DIGITS]}{suffix(name)}"
    os.replace(plain, path)
    return path


def write_set(path: Path, content: Arrays | Rows) -> None:
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
