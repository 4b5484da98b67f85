"""Floors of dependencies: releases that fixed what was published, and below what is tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FIXED = {
    "torch": "2.10",  # CVE-2025-32434 (2.6), CVE-2025-3730 (2.8), CVE-2025-2999, CVE-2025-3001
    "pillow": "12.3",  # CVE-2026-25990 (12.1.1), CVE-2026-40192 (12.2), PYSEC-2026-2253 to 2257
    "pyyaml": "5.4",  # CVE-2020-14343
    "scikit-learn": "1.5",  # CVE-2024-5206
    "cryptography": "50",  # CVE-2026-39892 (46.0.7), CVE-2026-69247
    "transformers": "5.5",  # CVE-2026-4372 (5.3), CVE-2026-5241
    "pyarrow": "23.0.1",  # CVE-2026-25087
    "onnx": "1.21",  # CVE-2026-27489, CVE-2026-28500, CVE-2026-34445
    "mlflow-skinny": "3.13",  # CVE-2026-2635, CVE-2026-8147
    "ray": "2.52",  # CVE-2025-62593
    "starlette": "1.3.1",  # CVE-2025-62727 (0.49.1), CVE-2026-48710 (1.0.1), CVE-2026-54283
    "h11": "0.16",  # CVE-2025-43859
    "setuptools": "78.1.1",  # CVE-2025-47273
}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for group in project["optional-dependencies"].values() for text in group]
    return [Requirement(text) for text in [*project["dependencies"], *extras]]


@pytest.mark.parametrize("name", FIXED)
def test_no_floor_admits_a_release_with_a_known_vulnerability(name):
    floors = [
        Version(bound.version)
        for requirement in requirements()
        if requirement.name == name
        for bound in requirement.specifier
        if bound.operator == ">="
    ]
    assert floors
    assert min(floors) >= Version(FIXED[name])


def test_the_tested_versions_are_allowed():
    text = (ROOT / "constraints.txt").read_text()
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))
    assert len(tested) > 100
    for requirement in requirements():
        version = tested.get(requirement.name.lower())
        assert version is None or requirement.specifier.contains(version), requirement
