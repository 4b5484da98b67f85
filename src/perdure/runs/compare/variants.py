"""Read what a comparison varies from the command line: methods, sweeps and seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from perdure.core.documents import yaml_value
from perdure.core.errors import UserError, bad_value
from perdure.core.text import argument

_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True)
class MethodChoice:
    """A method of a comparison."""

    kind: str
    """Kind of the method, or a name in `ALIASES`."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Keys of the method that override those of the config."""
    name: str | None = None
    """Label. If None, the kind and the keys."""


@dataclass(frozen=True)
class Alias:
    """A name in `methods` that stands for a method and for settings beside it."""

    kind: str
    """Kind of the method."""
    settings: dict[str, Any]
    """Values of config keys, such as {"stream.cumulative": True}."""


ALIASES = {"joint": Alias("fedavg", {"stream.cumulative": True})}
"""Names that are no kinds. `joint` is FedAvg on the examples of all tasks so far."""


@dataclass(frozen=True)
class Sweep:
    """A key of the config and the values that it takes."""

    key: str
    """Key with its section, such as train.lr."""
    values: tuple[Any, ...]
    """Values of the key, one run each."""


def read_methods(text: str) -> tuple[MethodChoice, ...]:
    """Read methods: kinds separated by commas, each followed by its keys after colons.

    Raises:
        UserError: The text cannot be read.

    Example:
        >>> read_methods("fedavg,fot:threshold=0.9")[1]
        MethodChoice(kind='fot', keys={'threshold': 0.9}, name=None)
    """
    choices = tuple(_method(part) for part in _split(text, ","))
    if not choices:
        raise bad_value(argument("methods"), text, "kinds separated by commas, such as fedavg,fot")
    return choices


def read_seeds(text: str) -> tuple[int, ...]:
    """Read different seeds: integers separated by commas, or ranges such as 0-4.

    Raises:
        UserError: The text cannot be read.

    Example:
        >>> read_seeds("0,5-7")
        (0, 5, 6, 7)
    """
    try:
        seeds = [seed for part in _split(text, ",") for seed in _seeds(part)]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        raise bad_value(argument("seeds"), text, "different integers, such as 0,1,2 or 0-4")
    return tuple(seeds)


def read_sweep(text: str) -> Sweep:
    """Read a sweep: a key of the config, and its values separated by commas.

    Raises:
        UserError: The text cannot be read.

    Example:
        >>> read_sweep("train.lr=0.1,0.05")
        Sweep(key='train.lr', values=(0.1, 0.05))
    """
    key, sign, raw = text.partition("=")
    values = tuple(_value(f"{_sweep_option()} {key}", part) for part in _split(raw, ","))
    if not sign or not key or not values:
        raise bad_value(_sweep_option(), text, "key=value,value, such as method.threshold=0.8,0.9")
    if key == "seed":
        expected = f"a key other than seed, which {argument('seeds')} varies"
        raise bad_value(_sweep_option(), text, expected)
    if len({repr(value) for value in values}) < len(values):
        raise bad_value(_sweep_option(), text, "a key with different values")
    return Sweep(key, values)


def _method(text: str) -> MethodChoice:
    kind, *settings = _split(text, ":")
    keys: dict[str, Any] = {}
    for setting in settings:
        key, sign, raw = setting.partition("=")
        if not sign or not key:
            raise bad_value(argument("methods"), text, "kind:key=value, such as fot:threshold=0.9")
        if key == "kind":
            expected = "the kind before the first colon, then other keys"
            raise bad_value(argument("methods"), text, expected)
        keys[key] = _value(f"{argument('methods')} {kind}:{key}", raw)
    return MethodChoice(kind, keys)


def _seeds(text: str) -> Iterator[int]:
    first, _, last = text.partition("-")
    yield from range(int(first), int(last or first) + 1)


def _value(key: str, raw: str) -> Any:
    try:
        return yaml_value(raw)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
    except (yaml.YAMLError, ValueError):
        raise bad_value(key, raw, "a YAML value") from None


def _split(text: str, sign: str) -> list[str]:
    """Split at a sign, except inside brackets, since a value may be a list or a mapping."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in _OPEN) - (letter in _CLOSE)
        if letter == sign and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _sweep_option() -> str:
    return argument("sweeps", option="--sweep")


def unknown_sweep_key(key: str, kinds: Sequence[str]) -> UserError:
    """Return the error for a swept hyperparameter that none of the methods has."""
    return bad_value(_sweep_option(), key, f"a hyperparameter of {' or '.join(kinds)}")
