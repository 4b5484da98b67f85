"""Data that is given in Python: a config names it by a hash of its content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from perdure.config import Config, change_source, parse, read_yaml
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import dotted_path, find_given, giving, is_object
from perdure.core.trees import decode, encode
from perdure.data.clients import config_location
from perdure.data.python_objects import (
    ACCEPTED,
    DEFAULT_KEYS,
    data_kind,
    is_parts,
    read_object,
    rows_from_tree,
    rows_to_tree,
)
from perdure.data.source import ObjectKeys
from perdure.data.sources.custom import CustomData, takes_task
from perdure.recipes import find_config

_PENDING = "given:data"
AnyConfig = Config | dict[str, Any] | str | Path


@contextmanager
def with_data(config: AnyConfig, data: Any, folder: Path | None = None) -> Iterator[Config]:
    """Yield the checked config whose source is data given in Python, which is found meanwhile.

    Raises:
        UserError: The data cannot be read, is not that of the run, or `config` names a source.

    """
    pending = _pending(config, data, folder)
    if callable(data) and not hasattr(data, "__getitem__"):
        path = _function_path(data)
        with giving(path, data):
            yield _named(pending, path)
        return
    rows = read_object(data, _section(pending), config_location(pending))
    kind = data_kind(data, rows)
    with giving(kind, rows):
        yield _named(pending, kind)


@contextmanager
def giving_all(objects: Sequence[Any], config: Config) -> Iterator[list[str]]:
    """Let objects that were given in Python be found, and yield their names in configs.

    Raises:
        UserError: An object cannot be read.

    """
    keys = _section(config) if config.data.is_custom else DEFAULT_KEYS
    names = []
    with ExitStack() as stack:
        for value in objects:
            rows = read_object(value, keys, config_location(config))
            names.append(data_kind(value, rows))
            stack.enter_context(giving(names[-1], rows))
        yield names


def _pending(config: AnyConfig, data: Any, folder: Path | None) -> Config:
    """Return the config with a section for given data, under its old name or none."""
    if isinstance(config, Config):
        if config.data.is_custom:
            return config
        if not config.data.is_default:
            raise _other_source(config.data.source)
        section = change_source(config.data, CustomData(source=_PENDING))
        return config.model_copy(update={"data": section})
    values = dict(config) if isinstance(config, dict) else read_yaml(find_config(config))
    keys, stream = values.get("data") or {}, values.get("stream") or {}
    if isinstance(keys, dict) and "source" in keys:
        raise _other_source(keys["source"])
    if isinstance(keys, dict) and isinstance(stream, dict):
        values |= {"data": {**keys, "source": _PENDING}, "stream": _stream(stream, data)}
    return parse(values, folder)


def _stream(stream: dict[str, Any], data: Any) -> dict[str, Any]:
    """Return the section of the stream; parts and functions are tasks unless it says otherwise."""
    parts = is_parts(data)
    if "kind" in stream or not (parts or callable(data)):
        return stream
    tasks = {"tasks": len(data)} if parts and "order" not in stream else {}
    return {"kind": "given", **tasks, **stream}


def _other_source(source: Any) -> UserError:
    return bad_value("data.source", source, "omitted, since data is given in Python")


def _section(config: Config) -> ObjectKeys:
    return cast(ObjectKeys, config.data)


def _function_path(data: Any) -> str:
    if not takes_task(data) or not hasattr(data, "__qualname__"):
        raise bad_value("data", getattr(data, "__name__", type(data).__name__), ACCEPTED)
    return dotted_path(data)


def _named(config: Config, kind: str) -> Config:
    """Return the config with the name of its data, which must be that of a run if it has one."""
    section = _section(config)
    if section.source not in (_PENDING, kind):
        raise bad_value("data", kind, f"the one that the run was made with, {section.source!r}")
    return config.model_copy(update={"data": section.model_copy(update={"source": kind})})


# ---- Data that is given in Python to a comparison, whose runs are separate processes


@contextmanager
def shared_data(
    values: dict[str, Any], data: Any, folder: Path | None
) -> Iterator[tuple[dict[str, Any], Path | None]]:
    """Yield the values of a config that names given data, and its file for worker processes."""
    if data is None:
        yield values, None
        return
    with with_data(values, data, folder) as config:
        source, stream = config.data.source, values.get("stream") or {}
        stream = {"kind": config.stream.kind, "tasks": config.stream.tasks, **stream}
        named = {**values, "data": {**(values.get("data") or {}), "source": source}}
        with _stored(source) as file:
            yield {**named, "stream": stream}, file


@contextmanager
def _stored(source: str) -> Iterator[Path | None]:
    """Yield a temporary file with given data; None for a function, which is imported."""
    if not is_object(source):
        if "<" in source or source.startswith("__main__."):
            raise bad_value("data", source, "a function that other processes can import")
        yield None
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "data.safetensors"
        file.write_bytes(encode(rows_to_tree(find_given(source))))
        yield file


@contextmanager
def stored_data(source: str, file: str | None) -> Iterator[None]:
    """Let the data in a file be found under its name."""
    if file is None:
        yield
        return
    with giving(source, rows_from_tree(decode(Path(file).read_bytes()))):
        yield
