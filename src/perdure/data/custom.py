"""Data of a custom function by its dotted path, and data that was given in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perdure.config import CustomData
from perdure.config.data import installed_sources
from perdure.core.errors import UserError
from perdure.core.given import find_given, is_object
from perdure.core.registry import import_object
from perdure.core.rng import Rng
from perdure.data.python_objects import (
    ACCEPTED,
    Parts,
    read_object,
    reading_of,
    reported,
    rows_sources,
)
from perdure.data.rows import Rows, rows_source
from perdure.data.source import ConfigLocation, Source

_DATA = ConfigLocation()
_PARTS = "'domains' or 'given', since the data comes in several parts"


@dataclass(frozen=True)
class TaskFunction:
    """A custom function that is asked for the data of one task at a time."""

    call: Callable[..., Any]
    config: CustomData
    location: ConfigLocation

    def rows(self, task: int) -> Rows:
        """Return the rows of a task, from 0.

        Raises:
            UserError: The function fails, or returns something else.
        """
        location = ConfigLocation(f"data of task {task + 1}", task, self.location.clients)
        value = _called(self.call, self.config, self.location, task=task)
        rows = read_object(value, self.config, location)
        if not isinstance(rows, Rows):
            raise UserError(f"{location.key}: must be one data set, got {type(value).__name__}")
        return rows


def load_custom(config: CustomData, rng: Rng, location: ConfigLocation) -> Source:
    """Return the source of a function, or of what was given in Python."""
    rows = custom_rows(config, location)
    if isinstance(rows, TaskFunction):
        raise UserError("stream.kind: must be 'given' for a function of task, got another kind")
    if not isinstance(rows, Rows):
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


def custom_rows(config: CustomData, location: ConfigLocation) -> Rows | Parts | TaskFunction:
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
