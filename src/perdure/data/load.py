"""Loading the sources of a config: by kind, by the user's function, or given in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from perdure.config import (
    Config,
    CustomData,
    DataConfig,
    DigitsData,
    FolderData,
    HuggingfaceData,
    IdxData,
    NamedData,
    NpzData,
    TableData,
    TextData,
)
from perdure.config.data import installed_sources
from perdure.core.errors import UserError
from perdure.core.registry import find_given, import_object, is_object
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, config_location
from perdure.data.examples import Examples, Source
from perdure.data.images import resize_source
from perdure.data.named.load import resolve_named
from perdure.data.python_objects import (
    ACCEPTED,
    Parts,
    read_object,
    reading_of,
    reported,
    rows_sources,
)
from perdure.data.rows import RawData, limit_test, limit_train, rows_source
from perdure.data.source import ConfigLocation
from perdure.data.sources.arrays import load_digits, load_idx, load_npz, load_npz_domains
from perdure.data.sources.huggingface import load_huggingface
from perdure.data.sources.image_folder import (
    load_client_domains,
    load_client_folders,
    load_folder,
    load_folder_domains,
)
from perdure.data.sources.table import load_table, load_table_domains
from perdure.data.sources.text import load_text, load_text_domains
from perdure.data.text import tokenize_if_text

# ------------------------------------------------------------------------------------------------
# Data of a custom function by its dotted path, and data that was given in Python.
# ------------------------------------------------------------------------------------------------

_DATA = ConfigLocation()
_PARTS = "'domains' or 'given', since the data comes in several parts"


@dataclass(frozen=True)
class TaskFunction:
    """A custom function that is asked for the data of one task at a time."""

    call: Callable[..., Any]
    config: CustomData
    location: ConfigLocation

    def rows(self, task: int) -> RawData:
        """Return the rows of a task, from 0.

        Raises:
            UserError: The function fails, or returns something else.

        """
        location = ConfigLocation(f"data of task {task + 1}", task, self.location.clients)
        value = _called(self.call, self.config, self.location, task=task)
        rows = read_object(value, self.config, location)
        if not isinstance(rows, RawData):
            raise UserError(f"{location.key}: must be one data set, got {type(value).__name__}")
        return rows


def load_custom(config: CustomData, rng: Rng, location: ConfigLocation) -> Source:
    """Return the source of a function, or of what was given in Python."""
    rows = custom_rows(config, location)
    if isinstance(rows, TaskFunction):
        raise UserError("stream.kind: must be 'given' for a function of task, got another kind")
    if not isinstance(rows, RawData):
        raise UserError(f"stream.kind: must be {_PARTS}, got another kind")
    with reported(rows, location):
        return rows_source(source_name(config), rows, reading_of(config, rng, location))


def load_custom_domains(config: CustomData, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Return one source per part or domain of what a function returns or Python was given."""
    rows = custom_rows(config, location)
    if isinstance(rows, TaskFunction):
        raise UserError("stream.kind: must be 'given' for a function of task, got 'domains'")
    with reported(rows, location):
        return rows_sources(rows, reading_of(config, rng, location))


def source_name(config: CustomData) -> str:
    """Return the name of a source in reports."""
    return "data" if is_object(config.source) else config.source.rpartition(".")[2]


def custom_rows(config: CustomData, location: ConfigLocation) -> RawData | Parts | TaskFunction:
    """Return what a section stands for.

    Raises:
        UserError: There is no such function, it fails, or it returns something else.

    """
    given = find_given(config.source)
    if given is not None and not callable(given):
        return read_object(given, config, location)
    function = find_function(config, location)
    if takes_task(function):
        return TaskFunction(function, config, location)
    value = _called(function, config, location)
    if takes_task(value):
        return TaskFunction(value, config.model_copy(update={"arguments": {}}), location)
    return read_object(value, config, location)


def takes_task(value: Any) -> bool:
    """Return whether a value is a function that is asked for one task at a time."""
    if not callable(value) or isinstance(value, type):
        return False
    try:
        return "task" in inspect.signature(value).parameters
    except (TypeError, ValueError):  # functions without a signature
        return False


def find_function(config: CustomData, location: ConfigLocation = _DATA) -> Callable[..., Any]:
    """Return the function that a section names; UserError if there is none."""
    source = config.source
    given: Callable[..., Any] | None = find_given(source)
    if given is not None:
        return given
    if is_object(source) or "<" in source:
        expected = "given again in Python, such as perdure.resume(run, data=data)"
        raise location.error("source", source, expected)
    try:
        function: Callable[..., Any] = import_object(
            installed_sources().get(source, source), config.folder
        )
    except Exception as error:  # whatever a custom file does when it is imported
        reason = f"{type(error).__name__}: {error}"
        expected = f"a function that can be imported ({reason})"
        raise location.error("source", source, expected) from error
    if not callable(function):
        raise location.error("source", source, "a function that returns data")
    return function


def _called(
    function: Callable[..., Any], config: CustomData, location: ConfigLocation, **task: int
) -> Any:
    try:
        value = function(**config.arguments, **task)
    except UserError:
        raise
    except Exception as error:  # whatever a custom function does
        reason = f"{type(error).__name__}: {error}"
        expected = f"a function that returns data ({reason})"
        raise location.error("source", config.source, expected) from error
    if value is None:
        raise location.error("source", config.source, f"a function that returns {ACCEPTED}")
    return value


# ------------------------------------------------------------------------------------------------
# Loading the sources of a config: one source, or one per domain.
# ------------------------------------------------------------------------------------------------

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

    Raises:
        UserError: A file is missing or damaged.

    """
    location = location or ConfigLocation()
    _check_target(config, location)
    kept: Source | None = config.take(("source", _content(config), rng.seed, location))
    if kept is not None:
        return kept
    return limit_and_resize(_read(config, rng, location), config, rng, location.number)


def load_and_keep(config: DataConfig, rng: Rng, location: ConfigLocation) -> Source:
    """Load a source that the same call of `load_source` returns again, once, without reading."""
    source = load_source(config, rng, location)
    config.keep(("source", _content(config), rng.seed, location), source)
    return source


def load_and_keep_domains(config: DataConfig, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load domains that the same call of `load_domains` returns again, once, without reading."""
    sources = load_domains(config, rng, location)
    config.keep(("domains", _content(config), rng.seed, location), sources)
    return sources


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
    kept: list[Source] | None = config.take(("domains", _content(config), rng.seed, location))
    if kept is not None:
        return kept
    sources = _read_domains(config, rng, location)
    return [limit_and_resize(source, config, rng, number) for number, source in enumerate(sources)]


def _check_target(config: DataConfig, location: ConfigLocation) -> None:
    """Refuse numbers as targets of a source that has classes."""
    if location.numbers and not config.has_numbers:
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
        case FolderData() if location.in_client_folders:
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
        case FolderData() if location.in_client_folders:
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
