"""Read JSON and YAML that others wrote: no code, and no text that grows when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from perdure.core.errors import UserError


def json_value(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError if it is none, or nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_number(value: Any, largest: float = 1e18) -> bool:
    """Return whether a value is a finite number of a plausible size."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -largest <= value <= largest


def is_count(value: Any, largest: int = 2**63) -> bool:
    """Return whether a value is an integer from 0 to a plausible size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest


# ---- Read YAML that others wrote: no code, no text that grows when it is read, no key given twice

_MAX_CHARACTERS = 1_000_000
_MAX_DEPTH = 50
_MAX_VALUES = 100_000
"""Values of a text after each alias has been replaced by what it stands for."""


def yaml_value(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        UserError: It is too large or too deep, has an alias of itself, or gives a key twice.
        yaml.YAMLError: It is not YAML.
        ValueError: It has a date or a number that does not exist.

    """
    if len(text) > _MAX_CHARACTERS:
        raise UserError(f"must have at most {_MAX_CHARACTERS} characters, got {len(text)}")
    return yaml.load(text, _Loader)


def read_yaml_value(path: Path) -> Any:
    """Return the value of a YAML file; UserError if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return yaml_value(file.read(_MAX_CHARACTERS + 1))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or no such date
        raise UserError(f"{path}: not a YAML file ({_first_line(error)})") from None


class _Loader(yaml.SafeLoader):
    """Refuses what is too large, and a key that is given twice, of which YAML takes the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node, whose depth is checked before what it contains is read."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UserError(f"must be nested at most {_MAX_DEPTH} deep, got more")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> Any:
        """Return the root, after counting the values that it stands for."""
        root = super().get_single_node()
        if root is not None and _count_values(root, {}) > _MAX_VALUES:
            raise UserError(f"must have at most {_MAX_VALUES} values, got more by its aliases")
        return root

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return the mapping of a node."""
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                continue
            key = self.construct_object(key_node)
            if key in keys:
                line = key_node.start_mark.line + 1
                raise UserError(f"{key}: must be given once, got it again in line {line}")
            keys.add(key)
        return super().construct_mapping(node, deep)


def _count_values(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Return the number of values below a node with its aliases replaced."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in counts:
        known = counts[id(node)]
        if known is None:
            raise UserError("must not have an alias of what contains it")
        return known
    counts[id(node)] = None
    parts = [part for pair in node.value for part in pair] if _is_mapping(node) else node.value
    counts[id(node)] = total = 1 + sum(_count_values(part, counts) for part in parts)
    return total


def _is_mapping(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode)


def _first_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"line {mark.line + 1}: {getattr(error, 'problem', None) or 'syntax'}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
