"""What every run ends with, simulated or live: summary.json, tables, report.html, and the numbers that matter."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from forge import trace as ev
from forge.metrics import summarise
from forge.report.page import headline, write_report
from forge.runs import RunFolder
from forge.scenario import Scenario
from forge.tables import TableWriter
from forge.types import ForgeError, Json


def finish(folder: RunFolder) -> Json:
    """Fold the trace into summary and tables, write the report, note the elapsed time."""
    with TableWriter(folder.path) as tables:
        summary = summarise(_past(tables, folder.events()), folder.scenario())
    folder.write("summary.json", summary)
    folder.end_life()
    warn(folder, summary)
    if summary["world"] == "live":
        _recalibrate(folder)
    write_report(folder)
    return summary


def _recalibrate(folder: RunFolder) -> None:
    """`recalibration.json` of a run that is long enough: what the simulator says of the rest once it saw the start."""
    from sim.recalibrate import CUT_S, recalibrate

    scenario = folder.scenario()
    if (scenario.stop.seconds or 0.0) < 2 * CUT_S:
        return
    if (found := recalibrate(list(folder.events()), scenario)) is not None:
        folder.write("recalibration.json", found)


def _past(tables: TableWriter, events: Iterable[ev.Event]) -> Iterator[ev.Event]:
    """Decoding a long trace is most of the work, so one pass feeds both."""
    for event in events:
        tables(event)
        yield event


def warn(folder: RunFolder, summary: Json) -> None:
    """On stderr, where a trace breaks the queue's laws: its figures are those of no legal run."""
    broken = summary["law_violations"]
    if broken:
        print(f"warning: {folder.trace}: the queue's laws are broken, first at {broken[0]}", file=sys.stderr)


def check_trained(summary: Json, scenario: Scenario) -> None:
    """Of a simulated run that is over and written down. Raises ForgeError where it trained on nothing."""
    if summary["items_consumed"]:
        return
    dead = ", ".join(f"{count} of {reason}" for reason, count in summary["dead"].items() if count)
    raise ForgeError(
        f"nothing was trained: of {summary['items_submitted']} items none finished, dead are {dead or 'none'}; "
        f"{_way_out(scenario)}"
    )


def _way_out(scenario: Scenario) -> str:
    """The key that most likely keeps items from finishing, with its value."""
    sim = scenario.sim
    if sim.instance_mtbf_s is not None:
        up = sim.instance_mtbf_s / (sim.instance_mtbf_s + sim.instance_repair_s)
        if up < 0.5 or sim.instance_mtbf_s < scenario.queue.item_timeout_s:
            return (
                f"sim.instance_mtbf_s = {sim.instance_mtbf_s:g} and sim.instance_repair_s = {sim.instance_repair_s:g}: "
                f"an instance is up {up:.2%} of the time; raise the first or lower the second"
            )
    return (
        f"raise queue.item_timeout_s = {scenario.queue.item_timeout_s:g}, or lower what kills members: "
        f"sim.domains.*.death_rate, sim.agents.*.failures"
    )


def show_headline(console: Console, folder: RunFolder, summary: Json) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for label, text in headline(summary, folder.read("evaluation.json")):
        table.add_row(f"[bold]{label}[/]", text)
    console.print(table, highlight=False)
    console.print(f"report: {folder.path / 'report.html'}", highlight=False, soft_wrap=True)
