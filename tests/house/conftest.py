"""The trace of a run, which is taken once for all tests of a process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import house


@pytest.fixture(scope="session")
def traced() -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return the measures of a run of FOT on the serial engine, and what each section called."""
    return house.shape(house.TRACED[:1])
