"""Read, change, check and write configs. A mistake becomes one sentence (UserError)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from perdure.config.overrides import override_key
from perdure.config.root import Config
from perdure.config.sentences import describe
from perdure.core.documents import read_yaml_value, yaml_value
from perdure.core.errors import UserError, bad_value
from perdure.core.text import argument

# ---- Read, change, check and write configs. A mistake becomes one sentence (UserError)

RUN_FORMAT = 1
"""The format of run directories, which their config.yaml and their checkpoints state."""


def parse(values: dict[str, Any], folder: Path | None = None) -> Config:
    """Return a checked config from plain values.

    Raises:
        UserError: A key or a value is not valid; the sentence names it and what is allowed.

    """
    return _validated(values, {"folder": folder})


def read_saved(values: dict[str, Any], folder: Path | None = None) -> Config:
    """Return the config of a run directory or of a trained model."""
    return _validated(values, {"folder": folder, "imports": folder is not None})


def load_saved(path: Path, folder: Path | None = None) -> Config:
    """Read the config of a run directory; `folder` as for `read_saved`."""
    values = _read_mapping(path)
    check_run_format(path, values.pop("format", None))
    return read_saved(values, folder)


def check_run_format(where: Path, found: Any) -> None:
    """Refuse a file of a run directory that states another format, or none."""
    if found != RUN_FORMAT:
        raise UserError(
            f"{where}: format: must be {RUN_FORMAT}, got {found!r}; use the version of perdure "
            "that started the run, or start a new run"
        )


def _validated(values: dict[str, Any], context: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(values, context=context)
    except ValidationError as error:
        raise UserError(describe(error.errors()[0], section=Config)) from None


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `key=value` overrides, and check the result."""
    return parse(override(read_yaml(path), overrides or []), Path(path).parent)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the values of a YAML file, which must be a mapping; that of a run may be one."""
    values = _read_mapping(Path(path))
    if "format" in values:
        check_run_format(Path(path), values.pop("format"))
    return values


def _read_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: {'a folder, not a' if path.is_dir() else 'no such'} config file")
    values = read_yaml_value(path)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a mapping of sections, got {type(values).__name__}")
    return values


def override(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return the values with `section.key=value` settings applied; values are read as YAML.

    Kinds are changed first, since this drops the keys of the kind before (see `override_key`).
    """
    for key, value in read_settings(overrides).items():
        values = override_key(values, key, value)
    return values


def read_settings(overrides: list[str]) -> dict[str, Any]:
    """Return `section.key=value` settings by key, those of kinds first."""
    settings = [_setting(text) for text in overrides]
    settings.sort(key=lambda setting: not setting[0].endswith((".kind", ".source", ".optimizer")))
    return dict(settings)


def _setting(text: str) -> tuple[str, Any]:
    key, sign, raw = text.partition("=")
    if not sign or not key:
        raise UserError(f"--set: must be key=value, such as train.lr=0.05, got {text!r}")
    try:
        return key, yaml_value(raw)
    except UserError as error:
        raise UserError(f"--set {key}: {error}") from None
    except (yaml.YAMLError, ValueError):
        raise bad_value(f"--set {key}", raw, "a YAML value") from None


def dump_saved(config: Config) -> str:
    """Return the complete config as YAML, as a run directory keeps it."""
    return f"format: {RUN_FORMAT}\n{dump(config)}"


def dump(config: Config) -> str:
    """Return the complete config as YAML."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text


# ---- Data that a command line names: a file, a folder, or a YAML file with one section or several.

_SOURCES = {
    ".npz": "npz",
    ".csv": "table",
    ".csv.gz": "table",
    ".parquet": "table",
    ".jsonl": "text",
    ".jsonl.gz": "text",
}
"""The source that reads a file, by the end of its name."""
_SECTION = "a mapping with `source`, or a list of them"


def read_data_spec(spec: str | Path) -> list[dict[str, Any]]:
    """Return the sections of `data` that a path stands for, one per task.

    Raises:
        UserError: There is no such path, or nothing reads it.

    """
    path = Path(spec)
    if not path.exists():
        raise UserError(
            f"{argument('data')}: must be a file or a folder, got {str(spec)!r}, which is not there"
        )
    if path.suffix in (".yaml", ".yml"):
        return _sections(path)
    if path.is_dir():
        return [{"source": "folder", "path": str(path.resolve())}]
    source = next((s for end, s in _SOURCES.items() if path.name.endswith(end)), None)
    if source is None:
        expected = f"a folder, a YAML file or one of {', '.join(_SOURCES)}"
        raise UserError(f"{argument('data')}: must be {expected}, got {str(spec)!r}")
    return [{"source": source, "path": str(path.resolve())}]


def _sections(path: Path) -> list[dict[str, Any]]:
    value = read_yaml_value(path)
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    sections = value if isinstance(value, list) else [value]
    if not sections or not all(isinstance(each, dict) and "source" in each for each in sections):
        raise UserError(f"{path}: must be {_SECTION}")
    return sections
