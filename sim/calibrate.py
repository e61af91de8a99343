"""From a trace, live or simulated, to the `[sim]` section that reproduces it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import tomli_w

from forge import trace as ev
from forge.scenario import Scenario
from forge.sections import DomainMix, Stop, ToolWait
from forge.sections_sim import Sim, SimDomain
from forge.types import ForgeError
from sim.core_fit import fit_core
from sim.fit import cached_shares, fit_domain, fit_line, shared_variance, usage_rows
from sim.measure import intervals, measure
from sim.paths import Paths, read_paths
from sim.predict import with_seed
from sim.workload import Workload, tool_wait
from sim.world import simulate

#: Figures of the measured run that the calibrated simulator is checked on.
CHECKED = ("trained_tokens_per_s", "items_per_s", "lag_items_mean", "engine_idle_fraction", "trainer_idle_fraction")

SHARE_ITEMS = 200  # items drawn to match `item_share`: its error is then about 0.03, below what a probe can tell

#: what a scenario plans and no live run has
PLANNED: dict[str, Any] = {"deployment": None, "tiers": None, "speculation": None, "agents": {}}
#: keys of a simulated run that are then as they were, and why
KEPT = {
    "deployment": "step_s, row_s, prefill_token_s and cached_share are not fitted: sim.deployment times the instances; "
    "its cost model is fitted by forge calibrate --points or --table",
    "agents": "sim.domains are not fitted: the work is that of sim.agents",
}

Fitted = dict[str, float]  # fields of `Sim`
Quality = dict[str, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted section, and how well it fits. `quality`: R^2 and relative errors of its parts, and pairs of
    `measured.X` and `simulated.X` figures, with the 95% interval of what seeds give. `notes`: what was not fitted."""

    sim: Sim
    quality: Quality
    notes: tuple[str, ...] = ()


def calibrate(events: Sequence[ev.Event], scenario: Scenario, source: str | None = None) -> Calibration:
    """Fit the `Sim` section to a run of `scenario`. `source` is noted in `calibrated_from`.

    What the trace does not show keeps the scenario's value; of a live run only what it was: it had neither the
    deployment nor the synthetic agents that the scenario may plan. Raises ForgeError without a finished item and a
    step.
    """
    steps = [e for e in events if isinstance(e, ev.Committed)]
    paths = read_paths(events)
    if not steps or not any(p.survived for p in paths.all()):
        raise ForgeError(f"{source or 'trace'}: nothing to calibrate on: no trainer step, or no trajectory that ended")
    if any(isinstance(e, ev.RunStarted) and e.world == "live" for e in events):
        scenario = scenario.model_copy(update={"sim": scenario.sim.model_copy(update=PLANNED)})
    given, quality = scenario.sim, Quality()
    fields = {
        **({} if given.deployment else _engine(events, quality)),
        **_agent_side(paths, quality),
        **_training(steps, quality),
        **_loads(events),
        **_failures(events, scenario),
    }
    domains = given.domains if given.agents else {d.name: _domain(d, paths, scenario) for d in scenario.domains}
    sim = given.model_copy(update={**fields, "domains": domains, "calibrated_from": source})
    _check_waits(paths, scenario, quality)
    _check_run(events, scenario.model_copy(update={"sim": sim}), quality)
    return Calibration(sim, quality, tuple(why for key, why in KEPT.items() if getattr(given, key)))


def to_toml(calibration: Calibration) -> str:
    """The `[sim]` section to put into a scenario, its quality as comments."""
    head = "".join(f"# {key} = {value:.4g}\n" for key, value in calibration.quality.items())
    head += "".join(f"# {note}\n" for note in calibration.notes)
    return head + tomli_w.dumps({"sim": calibration.sim.model_dump(mode="json", exclude_none=True)})


# --- parts ------


def _domain(mix: DomainMix, paths: Paths, scenario: Scenario) -> SimDomain:
    model = fit_domain(mix.name, paths, scenario.sim.domains.get(mix.name, SimDomain()))
    if scenario.queue.group == 1 or not paths.of(mix.name):
        return model  # nothing shows what an item's members share
    return model.model_copy(update={"item_share": match_share(model, mix, scenario)})


def match_share(model: SimDomain, mix: DomainMix, scenario: Scenario) -> float:
    """The `item_share` whose drawn members share as much variance of log length as `model.item_share` measured."""
    low, high = 0.0, 1.0
    for _ in range(7):
        share = (low + high) / 2.0
        sim = Sim(domains={mix.name: model.model_copy(update={"item_share": share})})
        workload = Workload(scenario.model_copy(update={"sim": sim, "domains": (mix,)}))
        items = [workload.item(position) for position in range(SHARE_ITEMS)]
        drawn = [[math.log(sum(t.output for t in m.steps)) for m in item.members] for item in items]
        if shared_variance(drawn) < model.item_share:
            low = share
        else:
            high = share
    return share


def _engine(events: Sequence[ev.Event], quality: Quality) -> Fitted:
    rows = usage_rows(events)
    if len(rows) < 2:
        return {}
    line = fit_line(rows[:, 1:], rows[:, 0])
    quality |= {"engine.r2": line.r2, "engine.error": line.error, "engine.rows": line.rows}
    step_s, row_s, prefill_token_s = line.coefficients
    fitted = {"step_s": max(step_s, 1e-9), "row_s": row_s, "prefill_token_s": prefill_token_s}
    if (shares := cached_shares(events)) is not None:
        fitted |= {"cached_share": shares[0], "cached_share_later": shares[1]}
    return fitted


def _agent_side(paths: Paths, quality: Quality) -> Fitted:
    work, latency, mean = fit_core(paths.all())
    quality["agents.ready_to_routed_s"] = mean
    return {"request_cpu_s": work, "request_latency_s": latency}


def _training(steps: Sequence[ev.Committed], quality: Quality) -> Fitted:
    """The first step is left out where there are enough: it pays for allocations that no later one does."""
    steps = steps[1:] if len(steps) > 3 else steps
    columns = np.array([[1.0, s.tokens] for s in steps])
    line = fit_line(columns, np.array([s.train_s for s in steps]))
    quality |= {"training.r2": line.r2, "training.error": line.error, "training.rows": line.rows}
    return {
        "train_step_s": line.coefficients[0],
        "train_token_s": line.coefficients[1],
        "data_s": fmean(s.data_s for s in steps),
        "save_s": fmean(s.io_s for s in steps),
    }


def _loads(events: Sequence[ev.Event]) -> Fitted:
    loads = [e.io_s for e in events if isinstance(e, ev.Loaded)]
    return {"load_s": fmean(loads)} if loads else {}


def _failures(events: Sequence[ev.Event], scenario: Scenario) -> Fitted:
    down: dict[int, float] = {}
    repairs: list[float] = []
    failures = 0
    for event in events:
        if isinstance(event, ev.InstanceDown):
            failures += 1
            down[event.instance] = event.t
        elif isinstance(event, ev.InstanceUp) and event.instance in down:
            repairs.append(event.t - down.pop(event.instance))
    if not failures:
        return {}
    up_s = events[-1].t * scenario.engine.instances - sum(repairs) - sum(events[-1].t - t for t in down.values())
    fitted = {"instance_mtbf_s": max(up_s / failures, 1e-3)}
    return fitted | ({"instance_repair_s": fmean(repairs)} if repairs else {})


# --- checks ------


def _check_waits(paths: Paths, scenario: Scenario, quality: Quality) -> None:
    """Tool waits are declared (`domains.tool_wait`), not fitted: here is whether the run kept to them."""
    for domain in scenario.domains:
        survivors = [p for p in paths.of(domain.name) if p.survived and p.done is not None]
        calls = sum(max(0, len(p.asks) - 1) for p in survivors)
        if calls and domain.tool_wait.median_s > 0:
            total = sum(p.done.tool_wait_s for p in survivors if p.done is not None)
            quality[f"measured.tool_wait_s.{domain.name}"] = total / calls
            quality[f"declared.tool_wait_s.{domain.name}"] = mean_wait(domain.tool_wait)


def mean_wait(wait: ToolWait) -> float:
    """Mean of the capped log-normal, seconds, over a thousand equally likely quantiles."""
    normal = NormalDist()
    return fmean(tool_wait(wait, normal.inv_cdf((i + 0.5) / 1000)) for i in range(1000))


def _check_run(events: Sequence[ev.Event], scenario: Scenario, quality: Quality) -> None:
    """Simulate the calibrated scenario beside the run it came from, which may have been a shorter one: items are
    submitted for as long as they were in the trace, and what is then under way ends.

    The run is one draw of its work, the simulated ones are three others: of few items with a heavy tail they differ
    by half, which their interval shows.
    """
    measured = measure(events, scenario)
    last = max(e.t for e in events if isinstance(e, ev.Submitted))
    scenario = scenario.model_copy(update={"stop": Stop(seconds=last + 1e-6)})
    runs = [measure(simulate(with_seed(scenario, seed)).events, scenario) for seed in range(3)]
    simulated = intervals(runs)
    for key in CHECKED:
        if key not in measured or key not in simulated:
            continue
        quality[f"measured.{key}"] = measured[key]
        quality[f"simulated.{key}"] = simulated[key].mean
        quality |= {f"simulated.{key}.low": simulated[key].low, f"simulated.{key}.high": simulated[key].high}
