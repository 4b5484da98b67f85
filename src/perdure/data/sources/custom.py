"""Data of a function that a config names by its dotted path, and data that was given in Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from perdure.config.section import Arguments, with_arguments
from perdure.core.errors import UserError
from perdure.core.registry import find_given, import_object, installed, is_object
from perdure.core.rng import Rng
from perdure.data.examples import Source
from perdure.data.python_objects import (
    ACCEPTED,
    Parts,
    read_object,
    reading_of,
    reported,
    rows_sources,
)
from perdure.data.rows import RawData, rows_source
from perdure.data.source import ConfigLocation, ObjectKeys
from perdure.data.sources import SOURCES

_DATA = ConfigLocation()
_PARTS = "'domains' or 'given', since the data comes in several parts"


class CustomData(ObjectKeys):
    """A function by its dotted path, which returns data; or data that was given in Python.

    Keys that are not listed here are arguments of the function.

    Example: `data: {source: mydata.load, root: ./images}`
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    has_numbers: ClassVar[bool] = True
    is_custom: ClassVar[bool] = True
    source: str = Field(json_schema_extra={"pattern": r"[.:]"})

    arguments: Arguments = Field(default={})
    """Arguments that have the name of a key, such as `size`; others may be given as keys."""

    _folder: Path | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _other_keys_are_arguments(cls, values: Any) -> Any:
        return with_arguments(values, cls.model_fields)

    @model_validator(mode="after")
    def _no_arguments_of_objects(self, info: ValidationInfo) -> CustomData:
        if self.arguments and is_object(self.source):
            key = next(iter(self.arguments))
            expected = "a key of data, since data that is given in Python takes no arguments"
            raise ValueError(f"{key}: must be {expected}, got {self.arguments[key]!r}")
        self._folder = (info.context or {}).get("folder")
        return self

    @property
    def folder(self) -> Path | None:
        """Where the file of the function is looked up before the working folder."""
        return self._folder

    def code(self) -> list[str]:
        """Return the path of the function; none if it is installed by name or given again."""
        is_given = is_object(self.source) or "<" in self.source  # a function without a path
        return [] if is_given or SOURCES.is_installed(self.source) else [self.source]

    def code_objects(self, folder: Path | None = None) -> list[Any]:
        """Return the function of `code`."""
        return [find_function(self) for _ in self.code()]

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Return the source of a function, or of what was given in Python."""
        rows = self.rows(location)
        if isinstance(rows, TaskFunction):
            raise UserError("stream.kind: must be 'given' for a function of task, got another kind")
        if not isinstance(rows, RawData):
            raise UserError(f"stream.kind: must be {_PARTS}, got another kind")
        name = "data" if is_object(self.source) else self.source.rpartition(".")[2]
        with reported(rows, location):
            return rows_source(name, rows, reading_of(self, rng, location))

    def load_domains(self, rng: Rng, location: ConfigLocation) -> list[Source]:
        """Return one source per part or domain of what a function returns or Python was given."""
        rows = self.rows(location)
        if isinstance(rows, TaskFunction):
            raise UserError("stream.kind: must be 'given' for a function of task, got 'domains'")
        with reported(rows, location):
            return rows_sources(rows, reading_of(self, rng, location))

    def rows(self, location: ConfigLocation) -> RawData | Parts | TaskFunction:
        """Return what the section stands for.

        Raises:
            UserError: There is no such function, it fails, or it returns something else.

        """
        given = find_given(self.source)
        if given is not None and not callable(given):
            return read_object(given, self, location)
        function = find_function(self, location)
        if takes_task(function):
            return TaskFunction(function, self, location)
        value = _called(function, self, location)
        if takes_task(value):
            return TaskFunction(value, self.model_copy(update={"arguments": {}}), location)
        return read_object(value, self, location)


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


def installed_sources() -> dict[str, str]:
    """Return the dotted paths of functions of installed packages, by name."""
    points = installed(str(SOURCES.group))
    return {name: each[0].value.replace(":", ".") for name, each in points.items()}
