"""What a scenario would do under other policies, said by the simulator within seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dashboards.records import Records
from forge.scenario import Scenario
from forge.types import ForgeError
from sim.streaming import Progress, stream
from sim.world import SimError

ITEMS = 120  # simulated of a scenario that has more: what a page answers with at once
MOST_INSTANCES = 4096  # beyond it, making them takes longer than a page should
LONGEST_S = 30.0  # of real time, after which a simulation is given up


@dataclass(frozen=True, slots=True)
class Answer:
    """A simulated run. `seconds`: real ones that it took."""

    records: Records
    seconds: float


class _TookTooLongError(Exception):
    pass


def shortened(scenario: Scenario, items: int) -> tuple[Scenario, str]:
    """The scenario with at most so many items, and a sentence where that may cut it short; empty where it does not."""
    stop = scenario.stop
    if stop.items is not None and stop.items <= items:
        return scenario, ""
    whole = " or ".join(
        f"{value:,.6g} {what}" for what in ("seconds", "steps", "items") if (value := getattr(stop, what)) is not None
    )
    shorter = scenario.model_copy(update={"stop": stop.model_copy(update={"items": items})})
    return shorter, f"Simulated are the first {items:,} items; the scenario itself goes on to {whole}."


def ask(scenario: Scenario, longest_s: float = LONGEST_S) -> Answer:
    """Simulate. Raises ForgeError where nothing can come of it, or it takes longer than a page should."""
    began = time.monotonic()
    if (count := scenario.engine.instances) > MOST_INSTANCES:
        raise ForgeError(
            f"engine.instances = {count}: a page simulates at most {MOST_INSTANCES}; forge sim --no-trace has no limit"
        )
    records = Records(scenario)

    def tell(progress: Progress) -> None:
        if time.monotonic() - began > longest_s:
            raise _TookTooLongError(f"{progress.items} items begun, {progress.calls:,} requests answered")

    try:
        done = stream(scenario, progress=tell, sinks=(records.beside,))
    except _TookTooLongError as late:
        raise ForgeError(
            f"given up after {longest_s:g} s ({late}): lower the number of items on the left; "
            f"`forge sim {scenario.name} --no-trace` has no limit"
        ) from None
    except SimError as error:
        raise ForgeError(f"{error}; no policy can go on from there") from None
    records.run, records.laws = done.run, done.laws
    if not records.run.items:
        raise ForgeError("stop: the run ends before its first item; let it last longer")
    records.events = 1
    records.summary()
    return Answer(records, time.monotonic() - began)
