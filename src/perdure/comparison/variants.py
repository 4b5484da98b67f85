"""What a comparison varies, read from a command line: methods, sweeps and seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from perdure.core.errors import UserError, bad_value

_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True)
class MethodChoice:
    """A method of the comparison: its kind, and the keys that it has here and not in the file."""

    kind: str
    keys: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    """What it is called; without it the kind and the keys."""


@dataclass(frozen=True)
class Sweep:
    """A key of the config and the values that it takes."""

    key: str
    values: tuple[Any, ...]


def read_methods(text: str) -> tuple[MethodChoice, ...]:
    """`fedavg,fot:threshold=0.9`: kinds with a comma between them, keys after colons.

    >>> read_methods("fedavg,fot:threshold=0.9")[1]
    MethodChoice(kind='fot', keys={'threshold': 0.9}, name=None)
    """
    found = tuple(_method(part) for part in _split(text, ","))
    if not found:
        raise bad_value("--methods", text, "kinds with commas between, such as fedavg,fot")
    return found


def read_seeds(text: str) -> tuple[int, ...]:
    """`0,1,2`, or `0-4` for a range; each at most once.

    >>> read_seeds("0,5-7")
    (0, 5, 6, 7)
    """
    try:
        found = [seed for part in _split(text, ",") for seed in _seeds(part)]
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found):
        raise bad_value("--seeds", text, "different integers, such as 0,1,2 or 0-4")
    return tuple(found)


def read_sweep(text: str) -> Sweep:
    """`method.threshold=0.8,0.9`: a key of the config and its values.

    >>> read_sweep("train.lr=0.1,0.05")
    Sweep(key='train.lr', values=(0.1, 0.05))
    """
    key, sign, raw = text.partition("=")
    values = tuple(_value(f"--sweep {key}", part) for part in _split(raw, ","))
    if not sign or not key or not values:
        raise bad_value("--sweep", text, "key=value,value, such as method.threshold=0.8,0.9")
    if key == "seed":
        raise bad_value("--sweep", text, "any key but the seed, which --seeds varies")
    if len({repr(value) for value in values}) < len(values):
        raise bad_value("--sweep", text, "each value once")
    return Sweep(key, values)


def _method(text: str) -> MethodChoice:
    kind, *settings = _split(text, ":")
    keys: dict[str, Any] = {}
    for setting in settings:
        key, sign, raw = setting.partition("=")
        if not sign or not key:
            raise bad_value("--methods", text, "kind:key=value, such as fot:threshold=0.9")
        if key == "kind":
            raise bad_value("--methods", text, "the kind before the first colon, and its keys")
        keys[key] = _value(f"--methods {kind}:{key}", raw)
    return MethodChoice(kind, keys)


def _seeds(text: str) -> Iterator[int]:
    first, _, last = text.partition("-")
    yield from range(int(first), int(last or first) + 1)


def _value(key: str, raw: str) -> Any:
    try:
        return yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError):
        raise bad_value(key, raw, "a YAML value") from None


def _split(text: str, sign: str) -> list[str]:
    """The parts between signs, but not inside brackets: a value may be a list or a mapping."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if letter == sign and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def unknown_sweep_key(key: str, kinds: Sequence[str]) -> UserError:
    """A swept key that none of the methods has."""
    return bad_value("--sweep", key, f"a hyperparameter of {' or '.join(kinds)}")
