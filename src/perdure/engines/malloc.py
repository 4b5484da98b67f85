"""Make malloc reuse freed memory instead of returning it to the operating system.

A step of stacked clients allocates and frees tensors of several megabytes. By default glibc returns
blocks of that size to the kernel, which then clears every page of the next block; for a wide MLP
this took a quarter of the training time. Blocks of up to 32 MB, the largest size that glibc
accepts, are reused instead.
"""

from __future__ import annotations

import ctypes
import functools
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Option numbers of glibc's malloc.h."""
_MAX_BLOCK_BYTES, _MAX_FREE_BYTES = 32 << 20, (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Set malloc's thresholds once per process; return whether this platform supports it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MAX_BLOCK_BYTES)) and bool(
        mallopt(_TRIM_THRESHOLD, _MAX_FREE_BYTES)
    )
