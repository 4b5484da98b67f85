"""Data sets from Hugging Face's hub and from torchvision."""

from __future__ import annotations

from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from perdure.config import ColumnPartition, DataSet, Hub, HuggingfaceData, NamedData, Torchvision
from perdure.core.optional import is_installed
from perdure.core.rng import Rng
from perdure.data.named.files import source_arrays
from perdure.data.named.official import Arrays, with_classes
from perdure.data.named.texts import Rows
from perdure.data.readers.hub_connection import is_reachable
from perdure.data.readers.huggingface import column_strings, dataset_rows, read_dataset
from perdure.data.rows import Reading, rows_source
from perdure.data.source import Array, ConfigLocation, Source
from perdure.models.adapter.module_import import import_library

_TEST = ("test", "validation", "valid", "val")


class Unavailable(Exception):
    """An origin cannot give a data set; the text says why."""


def download(data_set: DataSet, config: NamedData, location: ConfigLocation) -> Arrays | Rows:
    """Return the contents of a data set from the first origin that can give it.

    Args:
        data_set: The data set.
        config: The section with `size`, for sets whose images differ in size.
        location: The position of the section in the config.

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


def from_hub(data_set: DataSet, config: NamedData, location: ConfigLocation) -> Arrays | Rows:
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


def _rows(data: Any, hub: Hub) -> Rows:
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

    Args:
        cls: The class.
        origin: How it is called, and what its images and labels need.
        root: Its folder.
        download: Whether it may download.

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
