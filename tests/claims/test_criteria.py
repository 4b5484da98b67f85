"""Criteria over measured values, against Python's own meaning of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claims.criteria import Criterion
from perdure.core.errors import UserError

TEXTS = [
    "a.X > b.X",
    "a.X >= b.X > 0.5",
    "a.X - b.X < 0.1 and a.Y == b.Y",
    "a.X > max(b.X, a.Y, b.Y)",
    "abs(a.X - b.X) <= 0.5 * a.Y + b.Y / 2",
    "min(a.X, b.X) < 1 < a.Y",
]


class _Values:
    def __init__(self, x: float, y: float) -> None:
        self.X, self.Y = x, y


@pytest.mark.parametrize("text", TEXTS)
@given(st.lists(st.integers(-3, 3), min_size=4, max_size=4))
def test_it_is_what_python_makes_of_it(text: str, numbers: list[int]) -> None:
    x, y, u, v = (n / 2 for n in numbers)
    values = {"a.X": x, "a.Y": y, "b.X": u, "b.Y": v}
    expected = eval(text, {"a": _Values(x, y), "b": _Values(u, v)})
    assert Criterion(text).holds(values) is expected


def test_names_in_the_order_of_the_text() -> None:
    assert Criterion("b.X > max(a.routed.Y, b.X) and c.up == 3").names == [
        "b.X",
        "a.routed.Y",
        "c.up",
    ]


@pytest.mark.parametrize(
    "text", ["a.X >", "a.X or b.X", "not a.X", "open('x')", "a.X != 1", "a.X ** 2 > 1", "'text'"]
)
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(UserError, match="holds"):
        Criterion(text).holds({"a.X": 1.0, "b.X": 1.0})
