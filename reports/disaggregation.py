"""Where prefill and decode on different instances pay: the load that eight nodes hold, by how many of them prefill.

    .venv/bin/python reports/disaggregation.py [--quick]

Goodput is DistServe's: the highest rate of Poisson arrivals at which 90% of the requests meet both limits, TTFT and
TPOT, given as multiples of what a request alone on a node takes. Closed loop is what a rollout is: so many sessions
always under way, no limits, tokens a second. Writes reports/disaggregation/: results.json, results.md, goodput.png,
closed.png. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from forge.policies import CacheAware, Disaggregated, LeastDelay, LeastLoaded, Placement, Policies, Router
from forge.scenario import Scenario, parse
from sim.clock import FS
from sim.machines import machines
from sim.serve import Loop, Row, Serving
from sim.sessions import Session, Step

HERE = Path(__file__).parent / "disaggregation"
NODES = 8
DEPLOYMENT = {"model": "llama_3_1_70b", "hardware": "a800_sxm", "tp": 8}
BLOCK = 64
#: TTFT and TPOT as multiples of a request's alone: Mooncake's limits for its synthetic load, and tighter ones
LIMITS = {"loose": (10.0, 5.0), "tight": (5.0, 1.5)}
RATES = tuple(0.1 * 1.2**i for i in range(20))  # of what eight nodes could compute, prefill and decode added up
SIGMA = 0.5  # of the logs of prompts and answers
WAYS: dict[str, tuple[type[Router], Placement]] = {
    "disaggregated": (LeastLoaded, Disaggregated()),
    "least_delay": (CacheAware, LeastDelay(token_s=1.1e-4, transfer_token_s=3.3e-6)),  # of these nodes and cards
}
AT_ONCE = (16, 64, 256)  # sessions of the closed loop
TURNS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """Mean tokens of a prompt and an answer. `turns`: requests of a session, each of whose prompts holds the one before
    and its answer, and `prompt // turns` tokens more."""

    prompt: int
    output: int
    turns: int = 1


LOADS = {
    "chat, 1k + 250": Load(1_000, 250),
    "reasoning, 500 + 4k": Load(500, 4_000),
    "Mooncake's synthetic, 16k + 512": Load(16_000, 512),
    "documents, 64k + 512": Load(64_000, 512),
}
AGENTS = {"agents, 8 turns to 32k, 500 a turn": Load(32_000, 500, TURNS)}


@dataclass(frozen=True, slots=True)
class Work:
    """A trace of `count` sessions of a load, `rate` a second."""

    load: Load
    rate: float
    count: int
    seed: int
    block: int = BLOCK

    def sessions(self) -> Iterator[Session]:
        rng = np.random.default_rng(self.seed)
        starts = np.cumsum(rng.exponential(1.0, self.count)) / self.rate
        scale = np.exp(SIGMA * rng.normal(size=(self.count, self.load.turns, 2)) - SIGMA**2 / 2)
        for i, start in enumerate(starts.tolist()):
            yield Session(name=str(i), start_s=start, steps=tuple(self._steps(i, scale[i].tolist())))

    def _steps(self, chain: int, scale: list[list[float]]) -> Iterator[Step]:
        prompt = 0
        for turn, (prompts, outputs) in enumerate(scale):
            prompt += max(1, round(self.load.prompt / self.load.turns * prompts))
            output = max(2, round(self.load.output * outputs))
            path = ((chain, prompt // self.block),) if self.load.turns > 1 else ()
            after = (turn - 1,) if turn else ()
            yield Step(prompt=prompt, output=output, path=path, keep=bool(path), after=after)
            prompt += output


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="one load, three splits, few requests; nothing written")
    arguments.add_argument("--pages-only", action="store_true", help="write the page again from results.json")
    given = arguments.parse_args()
    if given.quick:
        print(*lines(measure(dict([next(iter(LOADS.items()))]), (0, 2, 4), 100, 1)), sep="\n")
        return
    from forge.runs import read_json, write_json, write_text

    HERE.mkdir(parents=True, exist_ok=True)
    if not given.pages_only:
        write_json(HERE / "results.json", measure(LOADS, SPLITS, 500, 2))
    results = read_json(HERE / "results.json")
    assert results is not None
    write_text(HERE / "results.md", "\n".join(lines(results)) + "\n")
    plot(results["goodput"], "requests/s a node", HERE / "goodput.png")
    plot(results["closed"], "tokens/s a node, prompts and answers", HERE / "closed.png")
    print(HERE / "results.md")


SPLITS = tuple(range(NODES - 1))  # nodes that prefill


def measure(loads: dict[str, Load], splits: tuple[int, ...], count: int, seeds: int) -> dict[str, Any]:
    """`goodput` by load, limits and way; `closed` by load, sessions and way; then by split, a number a seed."""
    from rich.progress import track

    rated, looped = list(product(loads, WAYS, splits)), list(product(loads | AGENTS, AT_ONCE, WAYS, splits))
    goodput: dict[str, Any] = {name: {} for name in loads}
    closed: dict[str, Any] = {name: {} for name in loads | AGENTS}
    with ProcessPoolExecutor() as pool:
        points = [(loads[name], way, split) for name, way, split in rated]
        held = pool.map(partial(held_rates, count=count, seeds=seeds), points)
        for (name, way, split), found in track(zip(rated, held, strict=True), "goodput", len(rated)):
            for limits, rates in found.items():
                goodput[name].setdefault(f"{limits}, {way}", {})[str(split)] = rates
        spins = [((loads | AGENTS)[name], sessions, way, split) for name, sessions, way, split in looped]
        speeds = pool.map(partial(closed_loop, count=count, seeds=seeds), spins)
        for (name, sessions, way, split), found in track(zip(looped, speeds, strict=True), "closed loop", len(looped)):
            closed[name].setdefault(f"{sessions}, {way}", {})[str(split)] = found
    return {"goodput": goodput, "closed": closed}


# --- one point ------


def scenario(prefill: int, placement: Placement) -> Scenario:
    deployed: dict[str, Any] = dict(DEPLOYMENT)
    if prefill:
        deployed["prefill"] = {"instances": prefill, "tp": DEPLOYMENT["tp"]}
    given = {
        "name": "disaggregation",
        "stop": {"items": 1},
        "domains": [{"name": "any", "weight": 1}],
        "engine": {"instances": NODES - prefill, "slots": 512, "max_context": 400_000},
        "sim": {"deployment": deployed, "block": BLOCK, "signals": {"period_s": 0.1, "delay_s": 0.0}},
    }
    made = parse(given, "reports/disaggregation.py")
    return made.model_copy(update={"policy": Policies(placement=placement)})


def serve(work: Work, prefill: int, loop: Loop, way: str) -> list[Row]:
    router, placement = WAYS[way]
    made = machines(scenario(prefill, placement))
    return Serving(work, made.instances, router(), loop=loop, period_s=0.1, seed=work.seed, front=made.before).run()


def alone(load: Load) -> tuple[float, float]:
    """Seconds of a mean prompt, and of a token after it, with a node to itself."""
    times = machines(scenario(0, Disaggregated())).plans[0][0]
    a, b, _ = times.line(1)
    return times.mixed(0, 0, [(load.prompt, 0)]) / FS, (a + b * load.prompt) / FS


def held_rates(point: tuple[Load, str, int], *, count: int, seeds: int) -> dict[str, list[float]]:
    """Requests/s a node by limits and seed: the last of the rates up to which all were held; 0 where none was."""
    load, way, prefill = point
    found = [_held(load, way, prefill, count, seed) for seed in range(seeds)]
    return {limits: [one[limits] for one in found] for limits in LIMITS}


def _held(load: Load, way: str, prefill: int, count: int, seed: int) -> dict[str, float]:
    ttft_s, tpot_s = alone(load)
    most = NODES / (ttft_s + load.output * tpot_s / 64)  # decoding 64 at a time: a scale, no bound
    good, best = dict.fromkeys(LIMITS, True), dict.fromkeys(LIMITS, 0.0)
    for share in RATES:
        rows = serve(Work(load, share * most, count, seed), prefill, Loop(), way)
        for limits, (first, later) in LIMITS.items():
            within = [row.ttft_s <= first * ttft_s and row.tpot_s <= later * tpot_s for row in rows]
            good[limits] = good[limits] and fmean(within) >= 0.9
            if good[limits]:
                best[limits] = share * most / NODES
        if not any(good.values()):
            break
    return best


def closed_loop(point: tuple[Load, int, str, int], *, count: int, seeds: int) -> list[float]:
    """Prompt and answer tokens/s a node, by seed."""
    load, sessions, way, prefill = point
    found = []
    for seed in range(seeds):
        work = Work(load, 1.0, max(sessions * 2, count // load.turns), seed)
        rows = serve(work, prefill, Loop(concurrency=sessions), way)
        seconds = max(row.ended for row in rows) / FS
        found.append(sum(row.prompt + row.output for row in rows) / seconds / NODES)
    return found


# --- what is written ------


def lines(results: dict[str, Any]) -> list[str]:
    splits = list(next(iter(next(iter(results["closed"].values())).values())))
    head = " | ".join(f"{p}:{NODES - int(p)}" for p in splits)
    rule = "|---|---|" + "---|" * len(splits) + "---|"
    out = [
        "# Where splitting prefill and decode pays",
        "",
        f"Made by `python reports/disaggregation.py`. {NODES} nodes of 8 A800, Llama-3.1-70B (tp 8, cost model with",
        "default efficiencies); prefill : decode nodes, 0 is aggregated; prompts in chunks of 8,192 tokens. Placement",
        "`disaggregated` with the router `least_loaded`, or `least_delay` with `cache_aware`. Means over seeds; the",
        "best split is bold.",
        "",
        "## Goodput, requests/s a node",
        "",
        "Limits as multiples of a request alone (TTFT, TPOT): "
        + "; ".join(f"{name} {first:g}x, {later:g}x" for name, (first, later) in LIMITS.items())
        + ". 90% of the requests meet both.",
        f"The highest rate tried is {RATES[-1]:.3g} of the scale of a load; a row of equal bests has reached it.",
        "",
        f"| load | limits, placement | {head} | best over 0:{NODES} |",
        rule,
    ]
    out += [row(name, limits, by) for name, of in results["goodput"].items() for limits, by in of.items()]
    out += [
        "",
        "![goodput](goodput.png)",
        "",
        *anchor(results["goodput"]),
        "## Closed loop, tokens/s a node",
        "",
        f"| load | sessions, placement | {head} | best over 0:{NODES} |",
        rule,
    ]
    out += [row(name, n, by) for name, of in results["closed"].items() for n, by in of.items()]
    return [*out, "", "![closed loop](closed.png)", ""]


def anchor(goodput: dict[str, Any]) -> list[str]:
    """Beside Mooncake's own finding, where its load was measured."""
    of = goodput.get("Mooncake's synthetic, 16k + 512")
    if of is None:
        return []
    means = {limits: {int(p): fmean(rates) for p, rates in by.items()} for limits, by in of.items()}
    bests = {limits: max(by, key=lambda p: by[p]) for limits, by in means.items()}
    even = NODES // 2
    told = [
        f"{limits} {best}:{NODES - best}, of which {even}:{NODES - even} holds {means[limits][even] / of_best:.0%}"
        for limits, best in bests.items()
        if (of_best := means[limits][best])
    ]
    return ["Published: splits near 1:1 are best on Mooncake's synthetic load. Here: " + "; ".join(told) + ".", ""]


def row(name: str, what: str, by_split: dict[str, list[float]]) -> str:
    means = [fmean(values) for values in by_split.values()]
    best = max(means)
    cells = " | ".join(f"**{mean:.3g}**" if mean == best else f"{mean:.3g}" for mean in means)
    gain = f"{best / means[0]:.2f}" if means[0] else "none holds aggregated"
    return f"| {name} | {what} | {cells} | {gain} |"


def plot(results: dict[str, Any], label: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(results), 3.6), layout="constrained")
    for axes, (name, of) in zip(np.atleast_1d(figure.subplots(1, len(results))), results.items(), strict=True):
        for what, by_split in of.items():
            means = [fmean(values) for values in by_split.values()]
            axes.plot([int(p) for p in by_split], means, marker="o", label=what)
        axes.set(title=name, xlabel=f"nodes of {NODES} that prefill", ylabel=label, ylim=(0, None))
        axes.title.set_fontsize(9)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
