"""Peak memory of the current process."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path


def peak_memory_mb() -> float | None:
    """Return the largest resident memory of this process so far in MB, or None if unknown."""
    with contextlib.suppress(OSError):  # Linux; getrusage would count the parent before exec too
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    try:
        resource = importlib.import_module("resource")
    except ImportError:
        return None
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
