"""Criteria: comparisons of measured values, such as `fot.ACC > max(fedavg.ACC, er.ACC)`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perdure.core.errors import bad_value

_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"max": max, "min": min, "abs": abs}


@dataclass(frozen=True)
class Criterion:
    """One or several comparisons, joined by `and`, of measured values such as `fot.ACC`."""

    text: str

    @property
    def names(self) -> list[str]:
        """Return the names of the measured values, in the order of the text.

        >>> Criterion("a.ACC > max(b.ACC, 0.5)").names
        ['a.ACC', 'b.ACC']
        """
        names: list[str] = []
        _collect_names(self._tree(), names)
        return list(dict.fromkeys(names))

    def holds(self, values: Mapping[str, float]) -> bool:
        """Return whether the criterion is true for these values.

        >>> Criterion("a.ACC - b.ACC < 0.1 and a.up == b.up").holds(
        ...     {"a.ACC": 0.5, "b.ACC": 0.45, "a.up": 3, "b.up": 3})
        True
        """
        return bool(_value(self._tree(), values, self.text))

    def _tree(self) -> ast.expr:
        try:
            return ast.parse(self.text, mode="eval").body
        except SyntaxError:
            raise _syntax_error(self.text) from None


def _collect_names(node: ast.expr, names: list[str]) -> None:
    """Append names in the order of the text, which ast.walk (breadth first) does not keep."""
    if isinstance(node, ast.Attribute | ast.Name):
        names.append(ast.unparse(node))
        return
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(node, ast.Call) and child is node.func
        if isinstance(child, ast.expr) and not is_function:
            _collect_names(child, names)


def _value(node: ast.expr, values: Mapping[str, float], text: str) -> Any:
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, values, text) for part in parts)
        case ast.Compare():
            return _compare(node, values, text)
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left, right = _value(node.left, values, text), _value(node.right, values, text)
            return _ARITHMETIC[type(node.op)](left, right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(arg, values, text) for arg in args))
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Attribute() | ast.Name():
            return values[ast.unparse(node)]
    raise _syntax_error(text)


def _compare(node: ast.Compare, values: Mapping[str, float], text: str) -> bool:
    if any(type(op) not in _ORDER for op in node.ops):
        raise _syntax_error(text)
    sides = [_value(side, values, text) for side in (node.left, *node.comparators)]
    return all(
        _ORDER[type(op)](left, right)
        for op, left, right in zip(node.ops, sides, sides[1:], strict=False)
    )


def _syntax_error(text: str) -> Exception:
    return bad_value("holds", text, "comparisons of run.METRIC joined by and")
