"""Puts `tests/` on the path, so that every test folder can import `worlds`; Hypothesis is deterministic here."""

from hypothesis import HealthCheck, settings

settings.register_profile("forge", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forge")
