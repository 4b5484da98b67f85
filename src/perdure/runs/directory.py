"""The run directory: everything that a run leaves, and who may write in it."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

from perdure.config import Config, dump, load
from perdure.core.errors import UserError
from perdure.core.files import remove_temporaries, write_atomic
from perdure.methods import fill_defaults, is_builtin
from perdure.runs.events import event_of
from perdure.runs.lock import FileLock, LockHeld

_log = logging.getLogger(__name__)
_CONTENT = ("config.yaml", "events.jsonl", "result.json", "checkpoints", "clients", "model")


class RunDirectory:
    """config.yaml, events.jsonl, result.json, checkpoints/, clients/ and model/ of one run.

    `RunDirectory.create` is for who writes (it takes the lock); `RunDirectory.open` for who reads.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.clients = self.path / "clients"
        self.model = self.path / "model"
        self._config = self.path / "config.yaml"
        self._events = self.path / "events.jsonl"
        self._result = self.path / "result.json"
        self._lock = FileLock(self.path / ".lock")

    @classmethod
    def create(cls, path: str | Path, config: Config, resume: bool) -> RunDirectory:
        """Begin a run in a new folder, or go on with one; refused with nothing written."""
        run = cls(path)
        run._check(config, resume)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._take_lock()
            run._check(config, resume)  # somebody may have come and gone before the lock was ours
            run._begin(config)
        except OSError as error:
            run.close()
            raise UserError(f"--out {path}: cannot be written ({error.strerror})") from None
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def check_can_create(cls, path: str | Path, config: Config, resume: bool) -> None:
        """Refuse what `create` would refuse, for another process that is going to create it."""
        cls(path)._check(config, resume)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """A run directory to read from."""
        run = cls(path)
        if not run._is_begun():
            raise UserError(f"{path}: not a run directory (it has no config.yaml)")
        return run

    def config(self) -> Config:
        """The complete config of the run."""
        try:
            return load(self._config)
        except UserError as error:
            said = str(error)
            named = said.startswith(str(self._config))
            raise UserError(said if named else f"{self._config}: {said}") from None

    def close(self) -> None:
        """Let others write here."""
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append_event(self, event: dict[str, Any]) -> None:
        """Add one line to events.jsonl; it is with the operating system when this returns."""
        line = json.dumps(_plain(event), allow_nan=False) + "\n"
        with self._events.open("ab") as file:
            file.write(line.encode())

    def events(self) -> list[dict[str, Any]]:
        """All events; a half-written last line is left out."""
        if not self._events.is_file():
            return []
        found = [event_of(line) for line in self._events.read_bytes().split(b"\n")[:-1]]
        if None in found:
            raise UserError(f"{self._events}: line {found.index(None) + 1} is no event of a run")
        return [event for event in found if event is not None]

    def events_size(self) -> int:
        """Bytes of events.jsonl, to be kept in a checkpoint."""
        return self._events.stat().st_size if self._events.is_file() else 0

    def truncate_events(self, size: int) -> None:
        """Cut off what came after a checkpoint, and a half-written last line."""
        if not self._events.is_file():
            return
        data = self._events.read_bytes()
        if len(data) < size:
            _log.warning("%s has lost lines: %d of %d bytes", self._events, len(data), size)
        whole = data[:size].rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._events, whole)

    def save_result(self, result: dict[str, Any]) -> None:
        """Write result.json at once; numbers that are not finite become null."""
        text = json.dumps(_plain(result), indent=2, allow_nan=False)
        write_atomic(self._result, (text + "\n").encode())

    def load_result(self) -> dict[str, Any]:
        """The result of a finished run."""
        try:
            result = json.loads(self._result.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{self.path}: has no result.json, the run is not finished") from None
        except (OSError, ValueError):
            raise UserError(f"{self._result}: cannot be read as JSON") from None
        if not isinstance(result, dict):
            raise UserError(f"{self._result}: must be an object, got {type(result).__name__}")
        return result

    def check_same_config(self, config: Config) -> None:
        """Refuse a complete config that is not the run's own, naming the first key that differs."""
        there, here = (flatten_keys(_comparable(each)) for each in (self.config(), config))
        keys = [*here, *(key for key in there if key not in here)]
        if not is_builtin(config.method):  # what came into the user's own class after the run
            keys = [key for key in keys if key in there or not key.startswith("method.")]
        for key in keys:
            old, new = there.get(key), here.get(key)
            if repr(old) != repr(new):  # by text, where NaN equals itself and 1 is not 1.0
                raise UserError(
                    f"{key}: must be {old!r} as in {self._config}, since a run is resumed with "
                    f"its own config, got {new!r}"
                )

    def _is_begun(self) -> bool:
        return self._config.is_file()

    def _begin(self, config: Config) -> None:
        if not self._is_begun():
            write_atomic(self._config, dump(config).encode())
        for folder in (self.path, self.model):
            remove_temporaries(folder)

    def _check(self, config: Config, resume: bool) -> None:
        if resume and self._is_begun():
            self.check_same_config(config)
        else:
            self._check_free(resume)

    def _check_free(self, resume: bool) -> None:
        """Refuse to begin where something is. (A lock alone: killed before its first file.)"""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--out {self.path}: must be a directory, got a file")
        if self._is_begun():
            raise UserError(
                f"--out {self.path}: holds a run already, use --resume or another --out"
            )
        if resume and not self._lock.path.exists():
            raise UserError(f"--resume {self.path}: not a run directory (it has no config.yaml)")
        for name in _CONTENT:
            if (self.path / name).exists():
                raise UserError(f"--out {self.path}: holds {name} already, use another --out")

    def _take_lock(self) -> None:
        try:
            self._lock.acquire()
        except LockHeld:
            holder = self._lock.holder()
            raise UserError(f"--out {self.path}: in use by process {holder}") from None


def _comparable(config: Config) -> dict[str, Any]:
    """The values of a config that may leave to defaults what another one spells out.

    A method of the user's own stays as it is: its file must not be loaded from here.
    """
    values = config.model_dump(mode="json")
    if is_builtin(values["method"]):
        values["method"] = fill_defaults(values["method"])
    return values


def custom_method_dir(run: str | Path | None) -> Path | None:
    """Where a run directory keeps the file of a method that is not the library's."""
    return Path(run) / "method" if run is not None else None


def flatten_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested sections as {"section.key": value}."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flatten_keys(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _plain(value: Any) -> Any:
    """Values that every JSON reader takes: numpy and torch scalars as numbers, NaN as null."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def peak_rss_mb() -> float | None:
    """The most memory that this process ever held, in MB; None where that is unknown."""
    with contextlib.suppress(OSError):  # Linux; getrusage would count the parent before exec too
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    try:
        usage = importlib.import_module("resource")
    except ImportError:
        return None
    peak: int = usage.getrusage(usage.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
