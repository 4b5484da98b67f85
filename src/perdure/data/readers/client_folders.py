"""Folders of images in which the first level names the client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from perdure.config import FolderData
from perdure.core.rng import Rng
from perdure.data.clients import with_clients
from perdure.data.readers.image_folder import (
    class_folders,
    decode_files,
    find_root,
    sorted_folders,
    split_images,
)
from perdure.data.source import ConfigLocation, Examples, Source


def load_client_folders(config: FolderData, rng: Rng, location: ConfigLocation) -> Source:
    """Load client/class/image, each client as `load_folder` does, as one source."""
    root = find_root(config, location)
    clients = sorted_folders(root)
    classes = sorted({name for client in clients for name in class_folders(client)})
    if not classes:
        raise location.error("path", root, "folders of the form client/class/image")
    return _load(root.name, {c.name: c for c in clients}, classes, config, rng, location)


def load_client_domains(config: FolderData, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load client/domain/class/image as one source per domain, in the order of their names."""
    root = find_root(config, location)
    folders = [domain for client in sorted_folders(root) for domain in sorted_folders(client)]
    classes = sorted({name for folder in folders for name in class_folders(folder)})
    if not classes:
        raise location.error("path", root, "folders of the form client/domain/class/image")
    return [
        _load(
            name, {f.parent.name: f for f in folders if f.name == name}, classes, config, rng,
            replace(location, number=number),
        )
        for number, name in enumerate(sorted({folder.name for folder in folders}))
    ]  # fmt: skip


def _load(
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
