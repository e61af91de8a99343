"""The simulated world: the same policies and control loop as `forge`, in virtual time."""

import forge  # noqa: F401 - it has the compiled modules found, before any of them is imported
