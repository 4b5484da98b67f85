"""Loading the sources of a config: one source, or one per domain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdure.config import (
    Config,
    CustomData,
    DataConfig,
    DigitsData,
    FolderData,
    FolderPartition,
    HuggingfaceData,
    IdxData,
    NamedData,
    NpzData,
    TableData,
    TextData,
)
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, config_location
from perdure.data.custom import load_custom, load_custom_domains
from perdure.data.named.load import resolve_named
from perdure.data.readers.client_folders import load_client_domains, load_client_folders
from perdure.data.readers.huggingface import load_huggingface
from perdure.data.readers.idx import load_idx
from perdure.data.readers.image_folder import load_folder, load_folder_domains
from perdure.data.readers.npz import load_digits, load_npz, load_npz_domains
from perdure.data.readers.table import load_table, load_table_domains
from perdure.data.readers.text import load_text, load_text_domains
from perdure.data.resize import resize_source
from perdure.data.source import ConfigLocation, Examples, Source
from perdure.data.subsets import limit_test, limit_train
from perdure.data.tokenization import tokenize_if_text

__all__ = [
    "ConfigLocation",
    "Examples",
    "Source",
    "limit_and_resize",
    "load_domains",
    "load_model_source",
    "load_source",
]


def load_source(config: DataConfig, rng: Rng, location: ConfigLocation | None = None) -> Source:
    """Load a source, limited and resized as its section asks.

    Args:
        config: The section that describes the source.
        rng: Generators of the run, for a test split and for limits.
        location: The position of the section in the config. Default: `data`.

    Raises:
        UserError: A file is missing or damaged.
    """
    location = location or ConfigLocation()
    _check_target(config, location)
    key = ("source", _content(config), rng.seed, location)
    if key in _KEPT:
        return _KEPT.pop(key)[0]
    return limit_and_resize(_read(config, rng, location), config, rng, location.number)


_KEPT: dict[Any, list[Source]] = {}
"""Sources that were read for the number of clients, for the stream that is made next."""


def load_and_keep(config: DataConfig, rng: Rng, location: ConfigLocation) -> Source:
    """Load a source that the same call of `load_source` returns again, once, without reading."""
    source = load_source(config, rng, location)
    _KEPT[("source", _content(config), rng.seed, location)] = [source]
    return source


def load_and_keep_domains(config: DataConfig, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load domains that the same call of `load_domains` returns again, once, without reading."""
    sources = load_domains(config, rng, location)
    _KEPT[("domains", _content(config), rng.seed, location)] = sources
    return sources


def forget_kept() -> None:
    """Forget sources that were kept and not used."""
    _KEPT.clear()


def _content(config: DataConfig) -> str:
    return config.model_dump_json(exclude={"normalize", "mean", "std"})


def load_model_source(config: Config, rng: Rng) -> Source:
    """Load the source of a config, tokenized if its model reads text."""
    source = load_source(config.data, rng, config_location(config))
    check_clients(config, source)
    return tokenize_if_text([source], config)[0]


def load_domains(
    config: DataConfig, rng: Rng, location: ConfigLocation | None = None
) -> list[Source]:
    """Load one source per domain from an npz file, folders domain/class, text or a table.

    The arguments are those of `load_source`.
    """
    location = location or ConfigLocation()
    _check_target(config, location)
    key = ("domains", _content(config), rng.seed, location)
    if key in _KEPT:
        return _KEPT.pop(key)
    sources = _read_domains(config, rng, location)
    return [limit_and_resize(source, config, rng, number) for number, source in enumerate(sources)]


def _check_target(config: DataConfig, location: ConfigLocation) -> None:
    """Refuse numbers as targets of a source that has classes."""
    if location.numbers and not isinstance(config, NpzData | TableData | CustomData):
        expected = "npz, table or data in Python with data.target 'number'"
        raise location.error("source", config.source, expected)


def limit_and_resize(source: Source, config: DataConfig, rng: Rng, number: int) -> Source:
    """Return a source with as many examples, of the size, that its section asks for."""
    source = limit_train(source, config.limit, rng.numpy_generator("limit", number))
    source = limit_test(source, config.test_limit, rng.numpy_generator("test limit", number))
    return resize_source(source, config.size, config.channels)


def _read(config: DataConfig, rng: Rng, location: ConfigLocation) -> Source:
    match config:
        case DigitsData():
            return load_digits(config, rng, location)
        case NpzData():
            return load_npz(config, rng, location)
        case IdxData():
            return load_idx(config, location)
        case FolderData() if isinstance(location.clients, FolderPartition):
            return load_client_folders(config, rng, location)
        case FolderData():
            return load_folder(config, rng, location)
        case TextData():
            return load_text(config, rng, location)
        case HuggingfaceData():
            return load_huggingface(config, rng, location)
        case TableData():
            return load_table(config, rng, location)
        case CustomData():
            return load_custom(config, rng, location)
        case NamedData():
            source = _read(resolve_named(config, location), rng, location)
            return replace(source, name=config.source)


def _read_domains(config: DataConfig, rng: Rng, location: ConfigLocation) -> list[Source]:
    match config:
        case NpzData():
            return load_npz_domains(config, rng, location)
        case FolderData() if isinstance(location.clients, FolderPartition):
            return load_client_domains(config, rng, location)
        case FolderData():
            return load_folder_domains(config, rng, location)
        case TextData():
            return load_text_domains(config, rng, location)
        case TableData():
            return load_table_domains(config, rng, location)
        case CustomData():
            return load_custom_domains(config, rng, location)
        case NamedData():
            return _read_domains(resolve_named(config, location), rng, location)
        case _:
            expected = "npz, folder, text or table; or stream.domains"
            raise location.error("source", config.source, expected)
