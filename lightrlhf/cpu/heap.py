"""Freed memory that the C library keeps for the next tensors, instead of giving it back to the system.

A training step or a decoding step frees its tensors and asks for the same sizes again. glibc returns large blocks to
the system, which then has to map and clear every page anew, slowly on virtual machines. Here it keeps blocks of up to
32 MiB, the most that it can, and up to 1 GiB at the end of its heap (howto/speed.md says what that gains). Thresholds
that the environment sets (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`) are left as they are.

Left out: other C libraries and systems, where nothing is changed, and other allocators (jemalloc, tcmalloc), which
would have to be loaded before Python starts.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of the parameters in glibc's malloc.h
THRESHOLDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
LARGEST_BLOCK, KEPT = 32 << 20, 1 << 30  # bytes


def keep_freed_memory() -> None:
    """Let glibc keep freed memory in this process from now on; does nothing with another C library."""
    tuned = any(name in os.environ for name in THRESHOLDS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or tuned:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_BLOCK)
        library.mallopt(M_TRIM_THRESHOLD, KEPT)
