"""Classes by name: built in, of an installed package, by dotted path, or given in Python."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, reduce
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from perdure.core.errors import UserError, bad_value
from perdure.core.given import dotted_path, find_given

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes that a key of a config may name.

    Args:
        key: The key, for messages.
        base: Class that they must be subclasses of.
        base_name: What users import it as.
        builtin: Dotted paths by name. They are imported when they are used, so that a class may lie
            in a layer above the registry.
        group: Entry-point group of installed packages that add names. If None, packages cannot.
    """

    def __init__(
        self,
        key: str,
        base: type[T],
        base_name: str,
        builtin: Mapping[str, str],
        group: str | None = None,
    ) -> None:
        self.key, self.base, self.base_name = key, base, base_name
        self.builtin, self.group = dict(builtin), group

    def names(self) -> list[str]:
        """Return all names, those of installed packages last."""
        return [*self.builtin, *(name for name in self._installed() if name not in self.builtin)]

    def name_of(self, cls: type[T]) -> str:
        """Return the kind that names a class: its built-in name, or its dotted path."""
        path = f"{cls.__module__}.{cls.__qualname__}"
        names = (name for name, builtin in self.builtin.items() if builtin == path)
        return next(names, None) or dotted_path(cls)

    def is_builtin(self, kind: Any) -> bool:
        """Return whether a kind names a class of this library."""
        return isinstance(kind, str) and kind in self.builtin

    def is_installed(self, kind: Any) -> bool:
        """Return whether a kind names a class of this library or of an installed package."""
        return isinstance(kind, str) and (kind in self.builtin or kind in self._installed())

    def find(self, kind: Any, folder: Path | None = None, key: str | None = None) -> type[T]:
        """Return the class that a kind names.

        Args:
            kind: A name, a dotted path to a class, or the class.
            folder: Where modules of a dotted path are looked up before the working folder.
            key: Key to name in messages. If None, that of the registry.

        Raises:
            UserError: There is no such class; the sentence says what is allowed.
        """
        key = key or self.key
        cls = kind if isinstance(kind, type) else self._import(kind, folder, key)
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise bad_value(key, kind, f"a subclass of {self.base_name}")
        return cls

    def _import(self, kind: Any, folder: Path | None, key: str) -> Any:
        path = self._path(kind)
        given = find_given(path)
        if given is not None:
            return given
        if "." not in path:
            raise bad_value(key, kind, f"{', '.join(self.names())}, or a dotted path to a class")
        try:
            return import_object(path, folder)
        except Exception as error:  # whatever a custom file does when it is imported
            reason = f"{type(error).__name__}: {error}"
            raise bad_value(key, kind, f"a class that can be imported ({reason})") from error

    def _path(self, kind: Any) -> str:
        if not isinstance(kind, str):
            return ""
        plugins = self._installed().get(kind, ())
        if len(plugins) + (kind in self.builtin) > 1:
            packages = ", ".join(sorted(_package(plugin) for plugin in plugins))
            owner = "perdure" if kind in self.builtin else "more than one of them"
            raise UserError(
                f"{self.group}: must be names that nobody else uses, got {kind!r} from {packages}, "
                f"which {owner} has too"
            )
        return plugins[0].value.replace(":", ".") if plugins else self.builtin.get(kind, kind)

    def _installed(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        return installed(self.group) if self.group else {}


def installed(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of installed packages in a group, by name."""
    return _plugins(group, tuple(sys.path))


@lru_cache(maxsize=8)
def _plugins(group: str, _path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name; read again when sys.path changes."""
    plugins: dict[str, tuple[EntryPoint, ...]] = {}
    for plugin in entry_points(group=group):
        plugins[plugin.name] = (*plugins.get(plugin.name, ()), plugin)
    return plugins


def _package(plugin: EntryPoint) -> str:
    return plugin.dist.name if plugin.dist is not None else plugin.module


def import_object(path: str, folder: Path | None = None) -> Any:
    """Import what a dotted path names, such as `package.module.Class` or `module.Class.function`.

    Args:
        path: The dotted path.
        folder: Where modules are looked up before the working folder.
    """
    parts = path.split(".")
    with importable(folder):
        for end in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:end])
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name or end == 1:
                    raise
                continue
            return reduce(getattr, parts[end:], module)
    raise ImportError(f"{path!r} is not a dotted path")


@contextmanager
def importable(folder: Path | None) -> Iterator[None]:
    """Let modules in a folder and in the working folder be imported by name."""
    extra = [str(path) for path in (folder, Path.cwd()) if path is not None]
    sys.path[:0] = extra
    try:
        yield
    finally:
        for path in extra:
            sys.path.remove(path)
