"""`report.html`: one run on one page, its pictures inside it and beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

from forge.metrics import LawCheck, RunFold, figures
from forge.metrics.conversations import Conversations
from forge.metrics.intervals import Interval, paired_interval
from forge.report.drawing import STYLE, Context
from forge.report.plots import PLOTS
from forge.report.prediction import compare
from forge.runs import RunFolder, write_text
from forge.scenario import Scenario
from forge.types import ForgeError, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One row of the held-out table: a domain, all of them, or another seed's run."""

    name: str
    tasks: int
    start: float
    end: float
    gain: Interval


def write_report(
    folder: RunFolder | Path,
    prediction: Json | None = None,
    evals: Json | None = None,
    others: Sequence[RunFolder] = (),
    records: tuple[RunFold, LawCheck] | None = None,
) -> Path:
    """Write `report.html` and its PNGs into the run folder; returns the page's path.

    `prediction` and `evals` default to the folder's `prediction.json` and `evaluation.json`. `others` are runs of the
    same scenario with other seeds, whose held-out gain is set beside this run's. `records`: what its trace
    would fold to, of a run that has none. Raises ForgeError.
    """
    run = folder if isinstance(folder, RunFolder) else RunFolder.open(folder)
    context = _context(run, run.read("evaluation.json") if evals is None else evals, records)
    prediction = run.read("prediction.json") if prediction is None else prediction
    recalibration = run.read("recalibration.json")
    pictures = []
    for name, (drawing, caption) in PLOTS.items():
        with mpl.rc_context(STYLE):
            pictures.append({"name": name, "caption": caption, "data": save(drawing(context), run.path / name)})
    scenario = run.scenario()
    text = render(
        "report.html",
        summary=context.summary,
        scenario=scenario,
        window=context.window,
        pictures=pictures,
        headline=headline(context.summary, context.evals),
        compared=compare(prediction, context.summary) if prediction else [],
        prediction=prediction or {},
        rescored=compare(recalibration, recalibration["measured"]) if recalibration else [],
        recalibration=recalibration or {},
        held_out=held_out_rows(context.evals) if context.evals else [],
        seeds=_seed_rows([run, *others]) if others else [],
        command=run.command(),
    )
    path = run.path / "report.html"
    write_text(path, text)
    return path


def _records(run: RunFolder, scenario: Scenario) -> tuple[RunFold, LawCheck, Conversations]:
    records, talk = RunFold(), Conversations()
    laws = LawCheck(scenario.shape(), scenario.queue.concurrency, scenario.engine.instances)
    for event in run.events():
        records.apply(event)
        laws.apply(event)
        talk.apply(event)
    return records, laws, talk


def _context(run: RunFolder, evals: Json | None, records: tuple[RunFold, LawCheck] | None) -> Context:
    scenario = run.scenario()
    folded, laws, talk = (*records, None) if records else _records(run, scenario)
    return Context(
        run=folded,
        summary=figures(folded, laws, scenario, talk),
        n=scenario.queue.n,
        window=scenario.shape().window,
        instances=scenario.engine.instances,
        evals=evals,
    )


def headline(summary: Json, evals: Json | None = None) -> list[tuple[str, str]]:
    """The numbers that matter, as (label, text): reward, throughput, idle shares, lag, non-stationarity."""
    reward = summary["reward"]
    if evals and "start" in evals and "end" in evals:
        everything = held_out_rows(evals)[-1]
        gain = f"{everything.start:.3f} → {everything.end:.3f} ({signed(everything.gain)})"
        first = ("Held-out reward", gain)
    elif reward["first"] is not None:
        first = ("Training reward", f"{reward['first']:.3f} → {reward['last']:.3f}")
    else:
        first = ("Training reward", "none")
    bound, j = summary["lag_items_bound"], summary["j_tokens"]
    dead = ", ".join(f"{reason} {count}" for reason, count in summary["dead"].items() if count)
    refused = summary.get("refused")  # not in older runs' summaries
    return [
        first,
        ("Throughput", f"{number(summary['throughput_tokens_per_s'])} tokens/s (prefilled, decoded and trained)"),
        (
            "Idle",
            f"engine {percent(summary['engine_idle_fraction'])}, trainer {percent(summary['trainer_idle_fraction'])}",
        ),
        ("Largest lag", f"{number(summary['lag_items_max'])} of {'no bound' if bound is None else bound} items"),
        ("Non-stationarity", f"{number(summary['nonstationarity'])} (1 is chance)"),
        ("J", f"{between(j['low'], j['high'])} tokens/s (trained, times modelled efficiency)" if j else number(None)),
        *([("Died unused", f"{dead} items")] if dead else []),
        *([("Refused", f"{number(refused)} requests (429), asked again")] if refused else []),
    ]


def held_out_rows(evals: Json) -> list[HeldOut]:
    """Per domain, then all tasks. `evals` is `evaluation.json`:

    {"start": {"scores": {task: score}}, "end": {"scores": {...}}, "domains": {task: domain}}. Raises ForgeError.
    """
    try:
        start, end = evals["start"]["scores"], evals["end"]["scores"]
        domains: dict[str, str] = evals["domains"]
        groups = {name: [t for t in start if domains[t] == name] for name in sorted({domains[t] for t in start})}
    except (KeyError, TypeError) as error:
        raise ForgeError(
            f"evaluation.json: needs start.scores, end.scores and domains of every task ({error})"
        ) from None
    rows = []
    for name, tasks in [*groups.items(), ("all", list(start))]:
        of_end = {t: s for t, s in end.items() if name == "all" or domains.get(t) == name}
        gain = paired_interval({t: start[t] for t in tasks}, of_end)
        mean = sum(start[t] for t in tasks) / len(tasks)
        rows.append(HeldOut(name=name, tasks=len(tasks), start=mean, end=mean + gain.mean, gain=gain))
    return rows


def _seed_rows(runs: Sequence[RunFolder]) -> list[HeldOut]:
    rows = []
    for run in runs:
        evals = run.read("evaluation.json")
        if evals and "start" in evals and "end" in evals:
            row = held_out_rows(evals)[-1]
            name = f"seed {run.scenario().seed}"
            rows.append(HeldOut(name=name, tasks=row.tasks, start=row.start, end=row.end, gain=row.gain))
    return rows


# --- shared with the comparison ------


def save(figure: Figure, path: Path) -> str:
    """Write a PNG without anything that changes from run to run; returns it in base64 for the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    path.write_bytes(buffer.getvalue())
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "signed": signed, "unit": with_unit}
    return environment.get_template(template).render(**values)


def number(value: float | None) -> str:
    """Three significant digits, thousands apart; null as a dash."""
    if value is None:
        return "—"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def between(low: float, high: float) -> str:
    return f"{number(low)} to {number(high)}"


def percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.1f}%"


def with_unit(value: float | None, unit: str) -> str:
    return percent(value) if unit == "share" else number(value)


def signed(interval: Interval) -> str:
    """`+0.31 [+0.25, +0.37]`."""
    bounds = "" if not interval.is_bounded else f" [{interval.low:+.3f}, {interval.high:+.3f}]"
    return f"{interval.mean:+.3f}{bounds}"
