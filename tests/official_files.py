"""Official files of data sets, written by hand from a few random images and texts."""

from __future__ import annotations

import bz2
import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np

RNG = np.random.default_rng(7)
TRAIN, TEST = 12, 5


def gray(count: int, side: int = 28) -> np.ndarray:
    return RNG.integers(0, 256, (count, side, side), dtype=np.uint8)


def color(count: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def labels(count: int, classes: int = 10, first: int = 0) -> np.ndarray:
    return np.arange(count) % classes + first


def write_idx(path: Path, array: np.ndarray) -> None:
    """Magic number, one big-endian length per dimension, bytes."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">i", n) for n in array.shape)
    data = head + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder: Path, prefix: str = "", test: str = "t10k", end: str = ".gz", first=0):
    arrays = {}
    for split, part, count in (("train", "train", TRAIN), (test, "test", TEST)):
        x, y = gray(count), labels(count, 10, first)
        write_idx(folder / f"{prefix}{split}-images-idx3-ubyte{end}", x)
        write_idx(folder / f"{prefix}{split}-labels-idx1-ubyte{end}", y)
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    return arrays


def binary_record(image: np.ndarray, *before: int) -> bytes:
    """Labels, then all red, all green and all blue values, row by row."""
    return bytes(before) + b"".join(image[:, :, c].tobytes() for c in range(3))


def cifar100_binary() -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    files, arrays = {}, {}
    for part, count in (("train", TRAIN), ("test", TEST)):
        x, y = color(count), labels(count)
        files[f"{part}.bin"] = b"".join(
            binary_record(image, 3, label) for image, label in zip(x, y, strict=True)
        )
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    files["fine_label_names.txt"] = "\n".join(f"class{i}" for i in range(10)).encode() + b"\n\n"
    return files, arrays


def pack(path: Path, files: dict[str, bytes], folder: str) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def python2_string(data: bytes) -> bytes:
    """As Python 2 pickles a string of any length."""
    return b"T" + struct.pack("<i", len(data)) + data


MINUS_ONE = b"J\xff\xff\xff\xff"
DTYPE = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN" + 2 * MINUS_ONE + b"K\x00tb"
RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"


def python2_array(array: np.ndarray) -> bytes:
    """As Python 2 pickles an array of bytes with two dimensions."""
    shape = b"".join(b"J" + struct.pack("<i", n) for n in array.shape) + b"\x86"
    data = python2_string(array.tobytes())
    return RECONSTRUCT + b"(K\x01" + shape + DTYPE + b"\x89" + data + b"tb"


def python2_dict(**values: bytes) -> bytes:
    items = b"".join(python2_string(key.encode()) + value for key, value in values.items())
    return b"\x80\x02}(" + items + b"u."


def python2_list(numbers) -> bytes:
    return b"](" + b"".join(b"K" + bytes([n]) for n in numbers) + b"e"


def cifar_python(label_key: str = "fine_labels") -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    files, arrays = {}, {}
    for part, count in (("train", TRAIN), ("test", TEST)):
        x, y = color(count), labels(count)
        rows = np.stack([np.frombuffer(binary_record(image), np.uint8) for image in x])
        values = {"data": python2_array(rows), label_key: python2_list(y)}
        files[part] = python2_dict(**values)
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    names = b"](" + b"".join(python2_string(f"class{i}".encode()) for i in range(10)) + b"e"
    files["meta"] = python2_dict(fine_label_names=names)
    return files, arrays


def write_usps(folder: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for part, name, count in (("train", "usps.bz2", TRAIN), ("test", "usps.t.bz2", TEST)):
        values, y = RNG.choice([-1.0, -0.5, 0.0, 0.5, 1.0], (count, 256)), labels(count)
        lines = [
            f"{label + 1} " + " ".join(f"{i + 1}:{v}" for i, v in enumerate(row))
            for label, row in zip(y, values, strict=True)
        ]
        (folder / name).write_bytes(bz2.compress("\n".join(lines).encode() + b"\n"))
        x = np.floor((values + 1) * 127.5).astype(np.uint8).reshape(-1, 16, 16)
        arrays |= {f"x_{part}": x, f"y_{part}": y}
    return arrays
