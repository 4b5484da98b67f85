"""Attacks use the federation without processes of tests/federation, and sums of tests/privacy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / name) for name in ("federation", "privacy")]


@pytest.fixture(autouse=True)
def recorded_campaigns(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Report the counts of the fuzz campaigns of a test, also of one that fails."""
    import fuzzing

    fuzzing.FOUND.clear()
    yield
    for counts in fuzzing.FOUND:
        record_property("fuzz", counts)
