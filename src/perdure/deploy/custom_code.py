"""Code in run directories: copies of the files of custom kinds, which run only if they are trusted.

A method, a stream, data, a model or a metric by dotted path is Python code of a user, of which a
run keeps a copy. Loading the run of another user executes this code, so it must be allowed
explicitly.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from perdure.config import Config, DataConfig
from perdure.config.section import KindSection, kind_sections
from perdure.contract.method import Method
from perdure.core.errors import UserError
from perdure.core.files import sha256, write_atomic
from perdure.core.registry import find_given, is_object
from perdure.evaluation.metrics import METRICS, Metric
from perdure.methods.registry import METHODS, parts_of

log = logging.getLogger(__name__)

_KINDS = (Method, KindSection, Metric, torch.nn.Module)
"""Classes that a config may name by their dotted path."""
_LIBRARIES = tuple(Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib"))


def code_folder(run: str | Path | None) -> Path | None:
    """Return the folder of a run directory for the files of custom kinds; None for None."""
    return Path(run) / "method" if run is not None else None


# ---- copies


def save_custom_code(config: Config, method: Method, run: Path, folder: Path | None = None) -> None:
    """Copy the files of custom methods, data, streams, models and metrics into the run directory.

    Files of installed packages are not copied.
    """
    for kind, part in parts_of(method, config.method["kind"]):
        if not METHODS.is_installed(kind):
            _copy(type(part), run)
    for section in custom_sections(config):
        for each in section.code_objects(folder):
            _copy(each, run)
    for name in _custom_metrics(config):
        _copy(METRICS.find(name, folder), run)


def custom_sections(config: Config) -> list[KindSection]:
    """Return the sections of a config, in any place, that name code of users."""
    configs = [config, *(config.at(task) for task in config.extension_starts)]
    return [section for each in configs for _, section in kind_sections(each) if section.code()]


def _custom_metrics(config: Config) -> list[str]:
    return [name for name in config.evaluate.metrics or () if not METRICS.is_installed(name)]


def _copy(value: Any, run: Path) -> None:
    """Copy the file of a class or function, and the files beside it that it imports."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    root = _root(module)
    if module is None or root is None:
        return
    for name, each in _with_imports(module, root).items():
        source = Path(str(each.__file__))
        path = Path(*name.split("."))
        target = path / "__init__.py" if source.name == "__init__.py" else path.with_suffix(".py")
        target = run / "method" / target
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, source.read_bytes())


def _root(module: ModuleType | None) -> Path | None:
    """Return the folder from which a module was imported; None if it is not a user's file."""
    source = getattr(module, "__file__", None)
    if module is None or source is None or not str(source).endswith(".py"):
        return None
    if module.__name__.partition(".")[0] in {"perdure", "__main__"}:
        return None
    file = Path(source).resolve()
    if any(file.is_relative_to(folder) for folder in _LIBRARIES):
        return None
    depth = module.__name__.count(".") + (file.name == "__init__.py")
    root = file.parents[depth]
    return None if _is_installed(module.__name__.partition(".")[0], root) else root


def _is_installed(name: str, folder: Path) -> bool:
    """Return whether pip put a module into a folder, such as by --user or --target.

    Such a module may have files of data beside it, which are not code to copy.
    """
    lines = (
        line
        for record in folder.glob("*.dist-info/RECORD")
        for line in record.read_text(encoding="utf-8").splitlines()
    )
    return any(line.startswith((f"{name}/", f"{name}.py,")) for line in lines)


def _with_imports(module: ModuleType, root: Path) -> dict[str, ModuleType]:
    """Return a module, its packages, and the modules below `root` that they import, by name."""
    found: dict[str, ModuleType] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        if each.__name__ in found or _root(each) != root:
            continue
        found[each.__name__] = each
        waiting += [sys.modules[name] for name in _named(each) if name in sys.modules]
    return found


def _named(module: ModuleType) -> Iterator[str]:
    package = module.__name__.rpartition(".")[0]
    if package:
        yield package
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        if isinstance(name, str):
            yield name


def code_hashes(run: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of custom code in a run directory, by name."""
    folder = run / "method"
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else []
    return {str(file.relative_to(run)): sha256(file.read_bytes()) for file in files}


# ---- trust


def data_sections(config: Config) -> list[DataConfig]:
    """Return all sections of data: of the config, of its domains and of its extensions."""
    added = [section for extension in config.extensions for section in extension.data or ()]
    return [config.data, *(getattr(config.stream, "domains", None) or []), *added]


def custom_kinds(config: Config, stream: bool = True, data: bool = True) -> list[str]:
    """Return the kinds of a config that are neither built in nor installed by name.

    Args:
        config: The config, as it is read without importing code.
        stream: Whether all of them are needed, as for training; else those of the method and the
            model, which predict.
        data: Whether a function that reads the data is needed, too.

    """
    parts = [config.method, *(config.method.get("with") or [])]
    kinds = [part["kind"] for part in parts if not METHODS.is_installed(part["kind"])]
    if not stream:
        return kinds + config.model.code()
    sections = [each for each in custom_sections(config) if data or not each.reads_data]
    kinds += [path for section in sections for path in section.code()]
    kinds += _custom_metrics(config)
    return list(dict.fromkeys(kinds))


def foreign_kinds(config: Config, stream: bool, data: bool = True) -> list[str]:
    """Return the custom kinds of a saved config that would execute code which is not loaded yet.

    Arguments as for `custom_kinds`. Data that was given in Python again is not foreign.
    """
    return [kind for kind in custom_kinds(config, stream, data) if not _is_loaded(kind)]


def _is_loaded(kind: str) -> bool:
    """Return whether a kind is a class of this process that a config may name, or was given.

    The call of a function, or of a class such as subprocess.Popen, may do anything.
    """
    given = find_given(kind)
    if given is not None:
        return True
    module, _, name = kind.rpartition(".")
    loaded = getattr(sys.modules.get(module), name, None)
    return isinstance(loaded, type) and issubclass(loaded, _KINDS)


def check_trust(
    config: Config, run: Path, trust: bool, stream: bool = False, data: bool = True
) -> Path | None:
    """Return the folder of a run's code, or None if none of it is needed.

    Raises:
        UserError: The run needs its code, and it is not trusted.

    """
    kinds = foreign_kinds(config, stream, data)
    if not kinds:
        return None
    _check_defined(kinds, run)
    hashes = code_hashes(run)
    files = "; ".join(f"{name} sha256 {value}" for name, value in hashes.items()) or "no files"
    if not trust:
        raise UserError(
            f"{run}: executes code that is not part of perdure ({', '.join(kinds)}; {files}): use "
            "trust=True (--trust-code) if you trust its author"
        )
    log.warning("executing %s with the code of %s: %s", ", ".join(kinds), run, files)
    return code_folder(run)


def _check_defined(kinds: list[str], run: Path) -> None:
    """Refuse a class of a notebook or script that this process has not defined."""
    lost = next((kind for kind in kinds if _has_no_file(kind) and find_given(kind) is None), None)
    if lost is not None and not hasattr(sys.modules["__main__"], lost.rpartition(".")[2]):
        raise UserError(
            f"{run}: needs {lost}, which was defined in a notebook or script: define it again in "
            "this process, or move it to a file and start a new run with its path, such as "
            f"my_file.{lost.rpartition('.')[2]}"
        )


def _has_no_file(kind: str) -> bool:
    return kind.startswith("__main__.") or "<locals>" in kind


def check_in_files(label: str, config: Config) -> None:
    """Refuse a run of a comparison whose code another process cannot import."""
    parts = [config.method, *(config.method.get("with") or [])]
    kinds = [part["kind"] for part in parts] + [config.model.kind]
    kinds += [path for section in custom_sections(config) for path in section.code()]
    kinds += config.evaluate.metrics or ()
    lost = next((kind for kind in kinds if _has_no_file(kind) or is_object(kind)), None)
    if lost is not None:
        raise UserError(
            f"{label}: must be a class in a file, such as my_file.Class, since every run of a "
            f"comparison is a separate process, got {lost!r}"
        )


def check_hashes(run: Path, expected: dict[str, str]) -> None:
    """Refuse code that differs from what a card names."""
    found = code_hashes(run)
    changed = next((name for name, value in expected.items() if found.get(name) != value), None)
    if changed is not None:
        raise UserError(f"{run / changed}: differs from the hash in model/card.json")
