"""Small runs that the tests of the prompt methods share."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "data": {"limit": 120},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 3, "partition": {"kind": "classes", "fraction": 0.6}},
    "model": {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4},
    "train": {"rounds": 2, "optimizer": "adam", "lr": 0.02, "batch_size": 32, "max_steps": 2},
    "engine": {"kind": "serial"},
}


def small(method: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A small config; a section given replaces the keys that it names."""
    values: dict[str, Any] = {**SMALL, "method": method}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return values
