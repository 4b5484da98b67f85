"""Axes around any values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.report.axes import make_scale
from perdure.report.figure_data import Axis

numbers = st.floats(-1e9, 1e9, allow_nan=False).map(lambda x: round(x, 6))


@given(st.lists(numbers, min_size=1, max_size=20))
def test_every_value_lies_between_the_ends(values: list[float]) -> None:
    found = make_scale(Axis("x"), values)
    slack = 1e-6 * (found.high - found.low)
    assert found.low - slack <= min(values)
    assert max(values) <= found.high + slack
    assert 2 <= len(found.ticks) <= 12
    assert found.ticks[0] == found.low


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_an_accuracy_stays_a_share_and_shows_at_least_its_span(values: list[float]) -> None:
    found = make_scale(Axis("accuracy", limits=(0.0, 1.0), min_span=0.1), values)
    assert found.low >= 0
    assert found.high <= 1 + 1e-9
    assert found.high - found.low >= 0.1 - 1e-9
    assert found.low - 1e-9 <= min(values)
    assert max(values) <= found.high + 1e-9
    texts = found.tick_labels
    assert len(set(texts)) == len(texts)
    assert [float(text) for text in texts] == pytest.approx(found.ticks, abs=1e-6)


@given(st.integers(1, 500))
def test_tasks_are_counted_in_whole_numbers(tasks: int) -> None:
    found = make_scale(Axis("task", integer=True), [1.0, float(tasks)])
    assert 1 <= len(found.ticks) <= 11
    assert all(tick == int(tick) and 1 <= tick <= tasks for tick in found.ticks)


def test_zero_is_on_the_axis_where_it_is_asked_for() -> None:
    assert make_scale(Axis("bytes", include_zero=True), [40.0, 90.0]).low == 0
    assert 0.0 in make_scale(Axis("forgetting", include_zero=True, min_span=0.1), [0.0, 0.0]).ticks
