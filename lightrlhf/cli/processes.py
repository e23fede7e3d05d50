"""Worker processes of a program.

Left out: other systems than Linux, where a hung process of a killed program stays.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_parent(parent: int | None = None) -> None:
    """Have this process killed when its parent ends, in whatever way.

    parent: the parent's process id, where `multiprocessing` does not know it.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None:
        has_ended = os.getppid() != parent
    elif (known := multiprocessing.parent_process()) is None:
        return
    elif multiprocessing.get_start_method() == "forkserver":  # which is the parent then
        has_ended = not known.is_alive()
    else:
        has_ended = os.getppid() != known.pid
    if has_ended:  # before the call above
        os._exit(1)
