"""The simulated world: the same policies and control loop as `forge`, in virtual time."""

from forge.compiled import use

use()
