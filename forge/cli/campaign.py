"""`forge sim --no-trace`: a run too long to keep its events. Figures, pictures and report come from the stream."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from forge.report.capacity import plan, text
from forge.report.page import write_report
from forge.runs import RunFolder, write_text
from forge.scenario import Scenario
from forge.types import Json
from sim import streaming

NOTE = (
    "This run was made with --no-trace: its events were folded while they happened and none was kept. summary.json,\n"
    "capacity.txt, report.html and the pictures are all there is: no trace.jsonl and no tables, so replay, export and\n"
    "calibrate cannot read it. For those run it again without the option, on fewer items.\n"
)
EVERY_S = 0.2  # between two looks at the bar


def run(scenario: Scenario, runs: Path) -> tuple[RunFolder, Json, str]:
    """Simulate into a new folder under `runs`; returns it, its summary, and the capacity plan."""
    folder = RunFolder.create(runs, scenario)
    readme = folder.path / "README.txt"
    write_text(readme, f"{readme.read_text(encoding='utf-8')}\n{NOTE}")
    with _bar() as bar:
        teller = _Teller(bar)
        done = streaming.stream(scenario, progress=teller)
        teller.show()
    summary = done.summary()
    folder.write("summary.json", summary)
    folder.end_life()
    planned = text(plan(scenario, done.run, summary))
    write_text(folder.path / "capacity.txt", planned)
    write_report(folder, records=(done.run, done.laws))
    return folder, summary, planned


def _bar() -> Progress:
    return Progress(
        TextColumn("submitted {task.completed:.0f} of {task.fields[of]}"),
        BarColumn(),
        TextColumn("{task.fields[calls]:,} calls, {task.fields[rate]:,.0f}/s, simulated {task.fields[clock]:.2f} h"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


class _Teller:
    """Moves the bar, a few times a second."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, of="?", calls=0, rate=0.0, clock=0.0)
        self._last: streaming.Progress | None = None
        self._next = 0.0

    def __call__(self, now: streaming.Progress) -> None:
        self._last = now
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            self.show()

    def show(self) -> None:
        """What it was last told."""
        if (now := self._last) is None:
            return
        self._bar.update(
            self._task,
            completed=now.items,
            total=now.of,
            of=now.of or "as many as come",
            calls=now.calls,
            rate=now.calls_per_s,
            clock=now.clock_s / 3600.0,
        )
