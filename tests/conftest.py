"""Puts `tests/` on the path, so that every test folder can import `worlds`; Hypothesis is deterministic here."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("forge", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forge")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several workers one takes a whole module, for its fixtures' sake; and one all live tests, which start
    processes of their own and would take the cores from each other."""
    for item in items:
        live = "live" in item.path.parts
        item.add_marker(pytest.mark.xdist_group("live" if live else str(item.path)))
