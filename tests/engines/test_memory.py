"""What the engines tell malloc, by the page faults that the kernel counts."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_ALLOCATE = """
import resource, sys
import torch
from perdure.engines.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
torch.zeros(5_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.zeros(5_000_000).add_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", _ALLOCATE, mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc")
def test_freed_blocks_are_used_again_without_the_kernel() -> None:
    """Ten tensors of 20 MB one after another: few of their pages are fetched anew."""
    assert 4 * faults("kept") < faults("plain")
