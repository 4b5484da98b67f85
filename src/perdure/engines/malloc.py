"""Freed memory stays with the process.

A step of stacked clients makes and frees tensors of megabytes. glibc gives blocks of that size back
to the kernel at once, which then clears every page of the next one: a quarter of the seconds of a
wide MLP were spent there. Blocks of up to 32 MB, the most that glibc allows, are kept instead.
"""

from __future__ import annotations

import ctypes
import functools
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The names of glibc's malloc.h."""
_BLOCK, _KEPT = 32 << 20, (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Tell malloc, once a process; False where there is no glibc, which is no harm."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
