"""Configs of run directories of earlier versions, which hold the keys of all kinds."""

from __future__ import annotations

from typing import Any

from perdure.config.base import ConfigSection
from perdure.config.domains import DomainConfig
from perdure.config.kinds import UNIONS, classes_of
from perdure.config.stream import STREAMS

_DATA = {
    "path": None,
    "test_fraction": 0.2,
    "image_column": "image",
    "label_column": "label",
    "text_column": "text",
    "features": 1024,
}
_STREAM = {
    "classes_per_task": None,
    "overlap": 0,
    "domains": None,
    "labels": "shared",
    "order": None,
}
_MODEL = {
    "hidden": [100, 100],
    "dropout": 0.0,
    "norm": None,
    "running_stats": True,
    "width": None,
    "depth": None,
    "heads": None,
    "patch": None,
    "train_layers": None,
    "max_tokens": 64,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "data": _DATA,
    "clients.partition": {"alpha": 0.5, "per_client": 2, "fraction": 0.6, "disjoint": False},
    "model": _MODEL,
    "train.schedule": {"gamma": 0.99, "every": 10, "floor": 0.0},
    "engine": {"chunk": None, "nodes": None, "timeout": 600.0},
}
"""By section the keys that earlier versions wrote for every kind, and their defaults."""


def without_other_kinds(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a saved config without defaults of kinds that it does not use."""
    values = dict(values)
    for section, defaults in _DEFAULTS.items():
        *parents, name = section.split(".")
        inner = values
        for parent in parents:
            inner[parent] = dict(inner[parent]) if isinstance(inner.get(parent), dict) else {}
            inner = inner[parent]
        if isinstance(inner.get(name), dict):
            inner[name] = _cleaned(inner[name], *UNIONS[section], defaults)
    train = values["train"]
    if train.get("optimizer") in ("adam", "adamw") and train.get("momentum") == 0:
        del train["momentum"]
    if isinstance(values.get("stream"), dict):
        values["stream"] = _stream(values["stream"])
    return values


def _stream(section: dict[str, Any]) -> dict[str, Any]:
    kind = section.get("kind")
    if not STREAMS.is_builtin(kind):
        return section
    section = _without_defaults(section, STREAMS.find(kind), _STREAM)
    if isinstance(section.get("domains"), list):
        domains = [_cleaned(domain, "source", DomainConfig, _DATA) for domain in section["domains"]]
        section = {**section, "domains": domains}
    return section


def _cleaned(section: Any, key: str, union: Any, defaults: dict[str, Any]) -> Any:
    """Return a section without what is not a key of its kind and holds its default."""
    classes = classes_of(union, key)
    kind = section.get(key) if isinstance(section, dict) else None
    return _without_defaults(section, classes[kind], defaults) if kind in classes else section


def _without_defaults(
    section: dict[str, Any], cls: type[ConfigSection], defaults: dict[str, Any]
) -> dict[str, Any]:
    return {
        key: value
        for key, value in section.items()
        if key in cls.model_fields or key not in defaults or value != defaults[key]
    }
