"""The simulated world: the same policies and control loop as `forge`, in virtual time."""
