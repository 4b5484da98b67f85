"""The names that the package itself offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import perdure
from perdure import contract

NEEDED = (
    "Method", "Train", "Exchange", "Needs", "Preferences", "Diagnosis", "Client",
    "Server", "Context", "Sum", "Each",
    "ClientResult", "Prepared", "Rows", "Scalar", "Step", "OncePerTask", "stacked", "Transform",
    "ProjectOut", "Proximal", "AddToGradient", "Change", "CollectedUploads", "LocalUpdate",
)  # fmt: skip
"""What a file with a method may need."""


@pytest.mark.parametrize("name", perdure.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(perdure, name) is not None


def test_a_method_needs_no_other_import() -> None:
    assert set(NEEDED) <= set(perdure.__all__)
    for name in NEEDED:
        assert getattr(perdure, name) is getattr(contract, name)


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'perdure' has no attribute 'ConfigLocation'"):
        perdure.ConfigLocation  # noqa: B018


def test_torch_is_loaded_only_when_it_is_needed() -> None:
    script = "import sys, perdure; assert 'torch' not in sys.modules; perdure.Method"
    subprocess.run([sys.executable, "-c", script], check=True)
