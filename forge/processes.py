"""What every child process of Forge does first: it must not outlive the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: linux/prctl.h: the signal this process gets when its parent dies.
PR_SET_PDEATHSIG = 1


def belong_to(parent: int) -> None:
    """Die with process `parent` (Linux; elsewhere the caller's pipes say so), and leave Ctrl-C to it.

    Ctrl-C reaches the whole process group; the parent alone decides what it means.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
