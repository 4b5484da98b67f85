"""Change one key of a config that is given as plain values, and drop the keys of its old kind."""

from __future__ import annotations

from typing import Any

from perdure.config.clients import PartitionConfig
from perdure.config.data import DataConfig
from perdure.config.engine import EngineConfig
from perdure.config.model import ModelConfig
from perdure.config.section import KindSection
from perdure.config.stream import StreamConfig
from perdure.config.train import FLAT_OPTIMIZER_KEYS, Aggregation, OptimizerConfig, Schedule
from perdure.core.errors import UserError

# ---- The sections of a config that have several kinds, and the keys of each kind

KIND_SECTIONS: dict[str, type[KindSection]] = {
    "data": DataConfig,
    "stream": StreamConfig,
    "clients.partition": PartitionConfig,
    "model": ModelConfig,
    "train.optimizer": OptimizerConfig,
    "train.schedule": Schedule,
    "train.aggregation": Aggregation,
    "engine": EngineConfig,
}
"""The sections with several kinds, by the base of their classes."""


def keys_of(section: str, kind: Any) -> set[str] | None:
    """Return the keys that a section has with a kind; None if they are not known."""
    if section not in KIND_SECTIONS:
        return None
    registry = KIND_SECTIONS[section].registry()
    is_readable = registry.is_readable(kind) and isinstance(kind, str)
    return set(registry.find(kind).model_fields) if is_readable else None


def drop_other_kinds(values: dict[str, Any], key: str, kind: Any) -> dict[str, Any]:
    """Return the values of a section, whose kind is going to be changed, without old keys."""
    section, _, name = key.rpartition(".")
    if key == "train.optimizer":
        kind = kind.get("kind", "sgd") if isinstance(kind, dict) else kind
        foreign = {flat for flat, (owner, _) in FLAT_OPTIMIZER_KEYS.items() if owner != kind}
        return {key: value for key, value in values.items() if key not in foreign}
    allowed = keys_of(section, kind) if name in ("kind", "source") else None
    if allowed is None or values.get(name) == kind:
        return values
    return {key: value for key, value in values.items() if key in allowed}


# ---- Change one key of a config that is given as plain values


def override_key(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return the values with `section.key` changed.

    Another kind of a section leaves only those of its keys that the new kind has.
    """
    return _set(values, key.split("."), value, key)


def _set(values: Any, path: list[str], value: Any, key: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"--set {key}: {path[0]!r} lies below a value that is not a section")
    if len(path) == 1:
        return drop_other_kinds(values, key, value) | {path[0]: value}
    return values | {path[0]: _set(values.get(path[0]) or {}, path[1:], value, key)}
