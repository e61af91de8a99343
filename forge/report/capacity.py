"""A simulated run on described accelerators, read as a capacity plan: what bounds it, and the devices a day takes."""

from __future__ import annotations

from forge.metrics import RunFold
from forge.report.page import number, percent
from forge.scenario import Scenario
from forge.types import Json

DAY_S = 86_400.0
#: a part that works more than this share of the time bounds the whole
FULL = 0.85

Lines = list[tuple[str, str]]


def plan(scenario: Scenario, run: RunFold, summary: Json) -> Lines:
    """Labels and texts. Rates are over the whole run, its start and its end included."""
    per_day = DAY_S / run.wall_s if run.wall_s > 0 else 0.0
    samples, calls = summary["samples_consumed"], run.calls
    done = f"{number(samples)} samples, {number(calls)} calls in {run.wall_s / 3600:.2f} h"
    rate = f"{number(samples * per_day)} samples, {number(calls * per_day)} calls"
    tokens = ", ".join(f"{name} {_big(n * per_day)}" for name, n in _tokens(run).items())
    lag, bound = summary["lag_items_max"], summary["lag_items_bound"]
    mean = f"mean {number(summary['lag_items_mean'])}, largest {number(lag)}, bound {number(bound)} items"
    return [
        ("Done", done),
        ("A day at this pace", rate),
        ("Tokens a day", tokens),
        ("Bound by", bottleneck(summary)),
        *_devices(scenario, run, summary),
        ("Idle", f"rollout {percent(summary['engine_idle_fraction'])}, {_trainer(summary)}"),
        ("Lag", f"{mean}; {number(summary['lag_steps_max'])} trainer steps at most"),
        ("Time to first token", _spread(summary["ttft_s"], 1.0, "s")),
        ("Time per output token", _spread(summary["tpot_s"], 1e3, "ms")),
    ]


def bottleneck(summary: Json) -> str:
    """What to have more of if the run is to be faster."""
    trainer, rollout = (1.0 - (summary[f"{part}_idle_fraction"] or 0.0) for part in ("trainer", "engine"))
    if max(trainer, rollout) < FULL:
        return "neither: agents wait for their tools, and the queue admits no more (concurrency, N, window)"
    return "the trainer" if trainer >= rollout else "rollout"


def text(lines: Lines) -> str:
    width = max(len(label) for label, _ in lines)
    return "".join(f"{label:<{width}}  {what}\n" for label, what in lines)


def _tokens(run: RunFold) -> dict[str, float]:
    trained = sum(step.tokens for step in run.steps)
    prompts, cached = sum(run.prompts[1::3]), sum(run.prompts[2::3])
    sent = {"of prompts": prompts, "of them believed cached": cached, "found cached": run.cached_tokens or 0}
    return {**sent, "prefilled": run.prefill_tokens, "decoded": run.decode_tokens, "trained": trained}


def _devices(scenario: Scenario, run: RunFold, summary: Json) -> Lines:
    """Rollout devices there are, and those that this work takes in a day if none ever idles."""
    of = scenario.sim.deployment
    if of is None or summary["engine_idle_fraction"] is None:
        return []
    each = of.tp * of.dp
    have = each * scenario.engine.instances
    if (pool := of.prefill) is not None:  # busy_s is of all instances alike: no telling whose
        behind = pool.tp * pool.dp * pool.instances
        return [("Rollout devices", f"{have} x {of.hardware} for answers, {behind} more for prompts")]
    needed = run.busy_s * each / DAY_S
    return [("Rollout devices", f"{have} x {of.hardware}; this work in a day takes {number(needed)} of them, all busy")]


def _trainer(summary: Json) -> str:
    return f"trainer {percent(summary['trainer_idle_fraction'])}"


def _spread(found: Json | None, factor: float, unit: str) -> str:
    if found is None:
        return number(None)
    return ", ".join(f"{name} {number(factor * value)} {unit}" for name, value in found.items())


def _big(value: float) -> str:
    """In thousands of millions where it has them."""
    return f"{value / 1e9:.3g} G" if value >= 1e9 else number(value)
