"""Floors of dependencies: releases that fixed what was published, and below what is tested."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FIXED = {
    "torch": "2.8",  # CVE-2025-32434 (2.6), CVE-2025-3730
    "pillow": "11.3",  # CVE-2025-48379, CVE-2024-28219
    "pyyaml": "5.4",  # CVE-2020-14343
    "scikit-learn": "1.5",  # CVE-2024-5206
    "cryptography": "44.0.1",  # CVE-2024-12797
    "transformers": "4.53",  # CVE-2025-6921 and earlier ones
    "pyarrow": "14.0.1",  # CVE-2023-47248
    "onnx": "1.18",  # CVE-2025-51480, CVE-2024-5187
    "mlflow-skinny": "3.5",  # CVE-2025-14279
    "ray": "2.52",  # CVE-2025-62593
    "starlette": "0.49.1",  # CVE-2025-62727
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
