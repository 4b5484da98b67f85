"""Kinds by name: built in, of an installed package, by dotted path, or given in Python."""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, reduce
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from perdure.core.errors import UserError, bad_value

# ---- Libraries that come with an extra of perdure, such as `pip install 'perdure[privacy]'`


def require(module: str, key: str, extra: str, reason: str = "") -> Any:
    """Import and return an optional module.

    Raises:
        UserError: The module is not installed.

    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise missing_extra(key, extra, reason) from None


def missing_extra(key: str, extra: str, reason: str = "") -> UserError:
    """Return the error for a config key that needs an extra which is not installed."""
    detail = f" ({reason})" if reason else ""
    return UserError(f"{key}: requires pip install 'perdure[{extra}]'{detail}")


def is_installed(module: str) -> bool:
    """Return whether a top-level module is installed."""
    return importlib.util.find_spec(module) is not None


# ---- Classes, functions and objects that were given in Python, by the names that configs hold

GIVEN: dict[str, Any] = {}
_OBJECT = "given:"


def dotted_path(value: Any) -> str:
    """Return the dotted path of a class or function, by which this process finds it again."""
    path = f"{value.__module__}.{value.__qualname__}"
    if getattr(sys.modules.get(value.__module__), value.__qualname__, None) is not value:
        GIVEN[path] = value
    else:
        GIVEN.pop(path, None)  # an earlier class of this name, such as one of a cell run again
    return path


def kind_of(value: Any) -> Any:
    """Return what a config holds for a kind that was given in Python.

    A class or function is named by its dotted path, a module (a callable object with a
    `state_dict`) by a hash of its content. Everything else is returned unchanged.
    """
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return dotted_path(value)
    if callable(value) and hasattr(value, "state_dict"):
        kind = object_kind(value)
        GIVEN[kind] = copy.deepcopy(value)
        return kind
    return value


def object_kind(module: Any) -> str:
    """Return the kind of a module: its class, a hash of its structure, and one of its values."""
    structure, values = hashlib.sha256(repr(module).encode()), hashlib.sha256()
    for name, value in module.state_dict().items():
        structure.update(f"|{name}|{value.dtype}|{tuple(value.shape)}".encode())
        values.update(value.detach().cpu().contiguous().numpy().tobytes())
    name = type(module).__name__
    return f"{_OBJECT}{name}-{structure.hexdigest()[:12]}-{values.hexdigest()[:12]}"


def give_again(kind: str, value: Any, exactly: bool = False) -> None:
    """Let a saved kind be found as a module or class that is given again.

    Raises:
        UserError: It is another one.

    """
    if value is None:
        return
    new = kind_of(value)
    same = new == kind or (
        not exactly and is_object(kind) and str(new).rpartition("-")[0] == kind.rpartition("-")[0]
    )
    if not same:
        raise bad_value("model", new, f"the one that the run was made with, {kind!r}")
    GIVEN[kind] = value


def object_name(name: str, content: str) -> str:
    """Return the name of an object in a config, from its type and the hash of its content."""
    return f"{_OBJECT}{name}-{content[:12]}"


@contextmanager
def giving(name: str, value: Any) -> Iterator[None]:
    """Let an object be found under a name for a while."""
    GIVEN[name] = value
    try:
        yield
    finally:
        GIVEN.pop(name, None)


def is_object(kind: Any) -> bool:
    """Return whether a kind names an object that was given in Python."""
    return isinstance(kind, str) and kind.startswith(_OBJECT)


def find_given(kind: str) -> Any:
    """Return what was given in this process under a name, or None."""
    return GIVEN.get(kind)


# ---- Classes by name: built in, of an installed package, by dotted path, or given in Python

T = TypeVar("T")


class Registry(Generic[T]):
    """The classes that a key of a config may name.

    Args:
        key: The key, for messages.
        base: Class that they must be subclasses of.
        base_name: What users import it as.
        builtin: Dotted paths by name, the default first. They are imported when they are used, so
            that a class may lie in a layer above the registry.
        group: Entry-point group of installed packages that add names. If None, packages cannot.
        others: Dotted path of the class that stands for all kinds that are not built in, which
            then name something else, such as a network. If None, they name classes, too.
        named: What a dotted path names, for messages.

    """

    def __init__(
        self,
        key: str,
        base: type[T],
        base_name: str,
        builtin: Mapping[str, str],
        group: str | None = None,
        others: str | None = None,
        named: str = "class",
    ) -> None:
        self.key, self.base, self.base_name = key, base, base_name
        self.builtin, self.group, self.others = dict(builtin), group, others
        self.named = named

    @property
    def default(self) -> str:
        """The first name, that of a section that names no kind."""
        return next(iter(self.builtin))

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

    def is_readable(self, kind: Any) -> bool:
        """Return whether the section of a kind can be read without code of a user."""
        return self.is_builtin(kind) or self.others is not None

    def is_custom_class(self, kind: Any) -> bool:
        """Return whether a kind names a class that is neither built in nor installed by name."""
        return self.others is None and not self.is_installed(kind)

    def find(self, kind: Any, folder: Path | None = None, key: str | None = None) -> type[T]:
        """Return the class that a kind names.

        Raises:
            UserError: There is no such class; the sentence says what is allowed.

        """
        key = key or self.key
        cls = kind if isinstance(kind, type) else self._import(kind, folder, key)
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise bad_value(key, kind, f"a subclass of {self.base_name}")
        return cls

    def _import(self, kind: Any, folder: Path | None, key: str) -> Any:
        path = kind if isinstance(kind, str) else ""
        plugins = self._installed().get(path, ())
        if len(plugins) + (path in self.builtin) > 1:
            packages = ", ".join(sorted(_package(plugin) for plugin in plugins))
            owner = "perdure" if path in self.builtin else "more than one of them"
            raise UserError(
                f"{self.group}: must be names that nobody else uses, got {kind!r} from {packages}, "
                f"which {owner} has too"
            )
        path = plugins[0].value.replace(":", ".") if plugins else self.builtin.get(path, path)
        given = find_given(path)
        if self.others is not None and not self.is_builtin(kind):
            if "." in path or is_object(path):
                return import_object(self.others)
        elif given is not None:
            return given
        if "." not in path:
            raise bad_value(
                key, kind, f"{', '.join(self.names())}, or a dotted path to a {self.named}"
            )
        try:
            return import_object(path, folder)
        except Exception as error:  # whatever a custom file does when it is imported
            reason = f"{type(error).__name__}: {error}"
            raise bad_value(key, kind, f"a class that can be imported ({reason})") from error

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
    """Import what a dotted path names, such as `package.module.Class` or `module.Class.function`"""
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
