"""Where a file is written until it is whole, and what processes that were killed meanwhile left there."""

from __future__ import annotations

import os
import re
from pathlib import Path


def temporary_for(path: Path) -> Path:
    """A hidden name beside `path`, this process's own. Those of processes that are no more are removed."""
    theirs = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.tmp")
    for other in path.parent.glob(".*.tmp"):
        if (found := theirs.fullmatch(other.name)) and not lives(int(found[1])):
            other.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def lives(process: int) -> bool:
    """Whether there is such a process, ours or not."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True
