"""Read, change, check and write configs. A mistake becomes one sentence (UserError)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from perdure.config.earlier_choices import with_earlier_choices
from perdure.config.earlier_runs import is_earlier, with_later_hyperparameters
from perdure.config.messages import describe
from perdure.config.overrides import override_key
from perdure.config.root import Config
from perdure.config.run_format import without_format
from perdure.config.saved import without_other_kinds
from perdure.core.errors import UserError, bad_value
from perdure.core.yaml_text import read_yaml_value, yaml_value


def parse(values: dict[str, Any], folder: Path | None = None) -> Config:
    """Return a checked config from plain values.

    Args:
        values: Sections as nested dicts. The kind of a method or of a stream may be a class.
        folder: Where files with custom classes are looked up. If None, in the working folder alone.

    Raises:
        UserError: A key or a value is not valid; the sentence names it and what is allowed.
    """
    return _validated(values, {"folder": folder})


def read_saved(values: dict[str, Any], folder: Path | None = None) -> Config:
    """Return the config of a run directory or of a trained model, also of an earlier version.

    Earlier versions wrote the keys of all kinds of a section; those of other kinds are dropped if
    they hold their default. Where they left a choice to the method, it is filled in, and so are
    hyperparameters that came later.

    Args:
        values: The config as plain values.
        folder: Where the class of a custom stream is looked up. If None, it is not imported, which
            is enough for everything but training.
    """
    context = {"folder": folder, "saved": True, "imports": folder is not None}
    config = with_earlier_choices(_validated(without_other_kinds(values), context))
    return with_later_hyperparameters(config) if is_earlier(values) else config


def load_saved(path: Path, folder: Path | None = None) -> Config:
    """Read the config of a run directory; `folder` as for `read_saved`."""
    return read_saved(read_yaml(path), folder)


def _validated(values: dict[str, Any], context: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(values, context=context)
    except ValidationError as error:
        raise UserError(describe(error.errors()[0], section=Config)) from None


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `key=value` overrides, and check the result."""
    return parse(override(read_yaml(path), overrides or []), Path(path).parent)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the values of a YAML file, which must be a mapping."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: {'a folder, not a' if path.is_dir() else 'no such'} config file")
    values = read_yaml_value(path)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{path}: must be a mapping of sections, got {type(values).__name__}")
    try:
        return without_format(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


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


def dump(config: Config) -> str:
    """Return the complete config as YAML, as a run directory keeps it."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    return text
