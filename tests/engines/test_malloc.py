"""Freed memory stays with the process, so that the next step need not ask the kernel for it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, torch
from perdure.engines.malloc import keep_freed_memory
if {kept}: keep_freed_memory()

def step():
    return [torch.ones(5_000_000) for _ in range(8)]  # all at once, each page written, then freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

step()
print(min(faults() for _ in range(8)))  # a busy kernel may take idle pages back now and then
"""


def faults(kept: bool) -> int:
    """Fewest pages that the kernel hands out in a step, after one that has touched as many."""
    script = STEPS.format(kept=kept)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="malloc is configured only under glibc"
)
def test_blocks_are_used_again() -> None:
    assert 4 * faults(kept=True) < faults(kept=False)
