"""Which scaffold a trajectory of a live run is played in."""

from __future__ import annotations

from forge.scaffolds import Scaffold, drawn
from forge.scenario import Scenario


def scaffold_of(scenario: Scenario, trajectory: str) -> Scaffold:
    """Drawn by `agents.scaffolds`' weights: one for all members and attempts of an item, and for a held-out task one in
    every evaluation of every seed. `trajectory`: "POSITION.MEMBER.ATTEMPT", or "eval-LABEL-INDEX.0"."""
    item = trajectory.partition(".")[0]
    label, _, index = item.rpartition("-")
    return drawn(scenario.agents.scaffolds, f"held out {index}" if label else f"{scenario.seed} {item}")
