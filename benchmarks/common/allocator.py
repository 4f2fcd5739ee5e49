"""The C library's allocator, told to keep what is freed."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST = 1 << 30


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, and return whether its C library can.

    glibc gives large blocks back to the system when they are freed. Whoever gets them next pays for
    their first touch, some 4 % of a prefill of 8,000 tokens, and who that is changes with the order
    of the candidates. PyTorch's tuning guide recommends allocators that do not.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, _LARGEST) for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))
