"""Freed memory stays with the process, so that the next step need not ask the kernel for it."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

STEP = """
import ctypes, torch
from perdure.training.engines.engine import keep_freed_memory
keep_freed_memory()
[torch.ones(5_000_000) for _ in range(8)]  # all at once, then freed
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
fields = [(name, ctypes.c_size_t) for name in names.split()]
Info = type("Info", (ctypes.Structure,), {"_fields_": fields})
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
print(mallinfo().fordblks)
"""
BYTES = 8 * 5_000_000 * 4


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc tells what malloc has kept"
)
@pytest.mark.slow
def test_freed_blocks_stay_with_the_process() -> None:
    """By default glibc returns blocks of this size to the kernel when they are freed."""
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= BYTES
