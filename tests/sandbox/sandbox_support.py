"""What tests of the sandbox share."""

from __future__ import annotations

import shutil

import pytest

from forge.sandbox.holder import PROGRAMS

MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
needs_bubblewrap = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (apt-get install bubblewrap util-linux)"
)
