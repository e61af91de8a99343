"""Peak memory of a stretch of work: on a GPU what torch allocated, on Linux what the process had resident."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch

MIB = 2.0**20


class Peak:
    """Measures from its making to `mib()`, above what was in use before. None where the system does not tell."""

    def __init__(self, device: str) -> None:
        self.device = device
        gc.collect()
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            self.before = float(torch.cuda.memory_allocated())
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide what is taken anew
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew (man 5 proc)
            self.before = _status("VmRSS")

    def mib(self) -> float | None:
        if self.device != "cpu":
            return (torch.cuda.max_memory_allocated() - self.before) / MIB
        return (_status("VmHWM") - self.before) / MIB if sys.platform == "linux" else None


def _status(key: str) -> float:
    """A memory figure of this process in bytes, as Linux gives it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * float(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
