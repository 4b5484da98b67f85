"""SIGKILL at random moments, resume, and the result is bit for bit that of an undisturbed run.

A sample is part of `make test-slow`; `make faults` kills every method and every setting on both
engines, PERDURE_KILLS times each method, five methods five times and settings half as often.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_configs import METHODS, SETTINGS, method_config, setting_config
from killed_runs import Campaign, write_config

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("PERDURE_KILLS", "0"))
"""Kills per pair of method and engine; 0 for a sample."""
OFTEN = ("fedprotip", "fot", "pip", "stamp", "special")
"""Methods that are killed five times as often."""
SAMPLE = {
    **{(kind, engine): 5 for kind in ("fedavg", "fedprox") for engine in ("serial", "vector")},
    **{(kind, engine): 3 for kind in OFTEN for engine in ("serial",)},
}
"""Kills of the methods in `make test-slow`."""
SAMPLE_SETTINGS = {
    ("buffered rounds", "serial"): 3,
    ("deferred exchanges", "serial"): 3,
    ("a checkpoint every third round", "vector"): 3,
}
CUSTOM = (
    Path(__file__).with_name("late.py"),
    Path(__file__).parents[1] / "federation" / "phased.py",
)


def pairs(names: Any, sample: dict[tuple[str, str], int]) -> list[tuple[str, str]]:
    every = [(name, engine) for name in names for engine in ("serial", "vector")]
    return every if KILLS else list(sample)


@pytest.fixture
def check(tmp_path: Path, record_property: Callable[..., None]) -> Callable[..., None]:
    """A function that kills the runs of a config, and records how often."""

    def check(values: dict[str, Any], kills: int, section: str, name: str) -> None:
        for file in CUSTOM:
            shutil.copy(file, tmp_path)
        campaign = Campaign(write_config(tmp_path, values), tmp_path)
        engine = values["engine"]["kind"]
        try:
            campaign.kill(kills)
        finally:
            named = {"section": section, "name": name, "engine": engine}
            record_property("faults", {**named, **campaign.counts})
        assert campaign.differences == 0

    return check


@pytest.mark.parametrize(("kind", "engine"), pairs(METHODS, SAMPLE))
def test_a_killed_method_ends_alike(kind: str, engine: str, check: Callable[..., None]) -> None:
    kills = KILLS * (5 if kind in OFTEN else 1) or SAMPLE[kind, engine]
    check(method_config(kind, engine), kills, "methods", kind)


@pytest.mark.parametrize(("name", "engine"), pairs(SETTINGS, SAMPLE_SETTINGS))
def test_a_killed_setting_ends_alike(name: str, engine: str, check: Callable[..., None]) -> None:
    kills = -(-KILLS // 2) or SAMPLE_SETTINGS[name, engine]
    check(setting_config(name, engine), kills, "settings", name)
