"""`forge bench sim-speed`: requests a second on a real trace, against stepping through every iteration, and exactness.

All rates are per CPU second of one process. Both sides of the ratio, and both sides of every error, are measured in the
same call; `both` measures the compiled core and the sources as they are, each in a process of its own.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from forge import compiled
from forge import scenario as scenarios
from forge.cost import CostModel, Deployment, hardware, model_card
from forge.policies import CacheAware
from forge.types import ForgeError, Json
from sim.clock import to_fs, to_s
from sim.engine import Instance, Shape
from sim.iteration import RooflineTimes
from sim.serve import Row, Serving
from sim.sessions import Session, Trace
from sim.streaming import stream
from sim.traces import mooncake

TRACE = "mooncake/conversation_trace.jsonl"
SOURCE = "kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl"
ON_TRACE = ("requests_per_s", "ratio_vs_stepped", "iterations_per_jump", "stepped_max_error_s", "oracle_max_error_s")
CAMPAIGN = "campaign_calls_per_s"
RATES = ("requests_per_s", CAMPAIGN)  # of which `both` measures a second, interpreted one
LOOP = "plain_loop_ns"  # of an empty Python loop's turn: how fast the machine is just now
RATES_ONLY = "rates"  # what a child is told to measure
INTERPRETED = "_interpreted"  # what `both` adds to the name of a rate

INSTANCES, BLOCK, BUDGET, SEATS = 16, 512, 2048, 256
TRIES = 3
STEPPED = 2000  # requests on which stepping is compared
JUDGED = 200  # requests that the oracle, which keeps every block as an object, is given
JUDGED_BLOCKS = 600  # of its instance: prompts compete for them


@dataclass(frozen=True, slots=True)
class First:
    """The first `count` sessions of a trace."""

    trace: Trace
    count: int

    @property
    def block(self) -> int:
        return self.trace.block

    def sessions(self) -> Iterator[Session]:
        return islice(self.trace.sessions(), self.count)


def both(data: Path | None, campaign_samples: int, tell: Callable[[str], None]) -> Json:
    """`run` on the compiled core, which is built where it is missing, and its rates interpreted. Where it cannot be
    built the reasons say why, and everything is interpreted."""
    _check(data)
    if not compiled.folder().is_dir():
        tell("compiling the simulator's core, once: a minute or two")
    why = compiled.ensure()
    tell("the trace jumped and stepped, the oracle, a campaign; some minutes")
    result = _child(data, campaign_samples, pure=False)
    if why is not None:
        nothing = {name + INTERPRETED: f"not compiled, so that the rates above are these: {why}" for name in RATES}
        return result | {
            "figures": result["figures"] | dict.fromkeys(nothing),
            "reasons": result["reasons"] | nothing,
        }
    tell("the rates, interpreted")
    plain = _child(data, campaign_samples, pure=True)
    for part in ("figures", "reasons"):
        result[part] |= {name + INTERPRETED: plain[part][name] for name in RATES if name in plain[part]}
    return result


def _check(data: Path | None) -> None:
    if data is not None and not data.is_dir():
        raise ForgeError(f"--data {data}: no such folder")


def _child(data: Path | None, campaign_samples: int, *, pure: bool) -> Json:
    what = RATES_ONLY if pure else "all"
    command = [sys.executable, "-m", "sim.speed_bench", what, str(campaign_samples)]
    command += [] if data is None else [str(data)]
    env = {name: value for name, value in os.environ.items() if name != compiled.PURE} | (
        {compiled.PURE: "1"} if pure else {}
    )
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ForgeError(f"{' '.join(command)}: ended with {done.returncode}; its words are above")
    found: Json = json.loads(done.stdout)
    return found


def run(
    data: Path | None,
    campaign_samples: int = 3000,
    *,
    stepped: int = STEPPED,
    judged: int = JUDGED,
    rates_only: bool = False,
) -> Json:
    """`figures`, `reasons` of those that are null, `protocol` in words. `rates_only`: RATES, without what stepping and
    the oracle say. Raises ForgeError where --data is no folder."""
    _check(data)
    figures: dict[str, float | None] = dict.fromkeys(RATES if rates_only else (*ON_TRACE, CAMPAIGN))
    reasons: dict[str, str] = {}
    if data is None or not (data / TRACE).is_file():
        place = "no --data folder" if data is None else f"{data / TRACE}: absent"
        lacking = f"{place}; {TRACE} is to be had from {SOURCE}"
        reasons |= {name: lacking for name in figures if name in ON_TRACE}
    else:
        trace = mooncake.load(data / TRACE)
        speed = _speed(trace)
        figures |= {name: speed[name] for name in speed if name in figures}
        if not rates_only:
            figures |= _against_stepping(First(trace, stepped))
            figures["oracle_max_error_s"] = error = _against_oracle(First(trace, judged))
            if error is None:
                reasons["oracle_max_error_s"] = "tests/sim/engine_oracle.py is not installed: run from a checkout"
    if campaign_samples:
        figures[CAMPAIGN] = campaign(campaign_samples)
    else:
        reasons[CAMPAIGN] = "skipped: --campaign-samples 0"
    figures[LOOP] = _loop_ns()
    return {"protocol": _protocol(campaign_samples), "figures": figures, "reasons": reasons}


def campaign(samples: int) -> float:
    """Calls a CPU second of the shipped campaign, cut to so many samples."""
    group = scenarios.load("campaign_m25").queue.group
    scenario = scenarios.load("campaign_m25", [f"stop.items={max(1, samples // group)}"])
    done = stream(scenario)
    return done.calls / done.cpu_s


def _loop_ns() -> float:
    turns = 3_000_000
    began = time.process_time()
    for _ in range(turns):
        pass
    return (time.process_time() - began) / turns * 1e9


# --- on the trace ------


def _speed(trace: Trace) -> dict[str, float]:
    best, jumps = float("inf"), 0.0
    for _ in range(TRIES):
        seconds, rows, jumps = _serve(trace, jump=True)
        best = min(best, seconds / len(rows))
    return {"requests_per_s": 1.0 / best, "iterations_per_jump": jumps}


def _against_stepping(trace: Trace) -> dict[str, float]:
    slow, stepped, _ = _serve(trace, jump=False)
    fast = float("inf")
    for _ in range(TRIES):
        seconds, jumped, _ = _serve(trace, jump=True)
        fast = min(fast, seconds)
    return {"ratio_vs_stepped": slow / fast, "stepped_max_error_s": _difference(_ends(stepped), _ends(jumped))}


def _deployed() -> Deployment:
    return Deployment(model=model_card("llama_3_1_70b"), hardware=hardware("h100_sxm"), tp=8)


def _serve(trace: Trace, *, jump: bool) -> tuple[float, list[Row], float]:
    """CPU seconds, what became of every request, iterations a jump."""
    on = _deployed()
    shape = Shape(block=BLOCK, capacity=int(on.kv_tokens) // BLOCK, budget=BUDGET, seats=SEATS, jump=jump)
    times = RooflineTimes(CostModel(on))
    fleet = [Instance(times, shape, listen=True) for _ in range(INSTANCES)]
    world = Serving(trace, fleet, CacheAware(), period_s=1.0, delay_s=0.1)
    gc.collect()
    began = time.process_time()
    rows = world.run()
    seconds = time.process_time() - began
    counters = [instance.usage(world.env.now) for instance in fleet]
    return seconds, rows, sum(c.iterations for c in counters) / max(1, sum(c.spans for c in counters))


def _ends(rows: Sequence[Row]) -> dict[tuple[int, int], tuple[int, int]]:
    return {(row.session, row.step): (row.first, row.ended) for row in rows}


def _difference(one: dict[Any, tuple[int, int]], other: dict[Any, tuple[int, int]]) -> float:
    """Seconds, the largest of first tokens and ends."""
    if one.keys() != other.keys():
        return float("inf")
    return to_s(max(abs(a - b) for key, times in one.items() for a, b in zip(times, other[key], strict=True)))


# --- against the oracle ------


def _oracle() -> ModuleType | None:
    """The second model of an instance, test code that a checkout has."""
    path = Path(__file__).parent.parent / "tests" / "sim" / "engine_oracle.py"
    spec = importlib.util.spec_from_file_location("engine_oracle", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("engine_oracle", module)  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def _against_oracle(trace: Trace) -> float | None:
    """One instance with little memory, as much work as the trace has for all. None: there is no oracle."""
    oracle = _oracle()
    if oracle is None:
        return None
    times = RooflineTimes(CostModel(_deployed()))
    shape = Shape(block=BLOCK, capacity=JUDGED_BLOCKS, budget=BUDGET, seats=SEATS)
    rows = Serving(trace, [Instance(times, shape, listen=True)], CacheAware(), period_s=1.0, delay_s=0.1).run()

    def cost(decodes: int, context: int, chunks: list[tuple[int, int]]) -> int:
        a, b, _ = times.line(decodes)
        return times.mixed(decodes, context, chunks) if chunks else a + b * context

    asked = []
    for i, session in enumerate(trace.sessions()):
        (step,) = session.steps
        arrival = to_fs(session.start_s) + to_fs(step.delay_s)
        asked.append(oracle.OracleRequest(i, arrival, step.prompt, step.output, step.path, step.keep))
    result = oracle.OracleInstance(BLOCK, JUDGED_BLOCKS, BUDGET, SEATS, cost).run(asked)
    judged = {(i, 0): (one.first_token, one.end) for i, one in result.requests.items()}
    return _difference(_ends(rows), judged)


def _protocol(samples: int) -> str:
    return (
        f"core {'compiled' if compiled.in_use() else 'interpreted'}; "
        f"{TRACE}: llama_3_1_70b on {INSTANCES} x 8 h100_sxm, cache_aware, signals every 1 s and 0.1 s old, CPU "
        f"seconds of one process, best of {TRIES}; stepping on the first {STEPPED} requests; oracle on the first "
        f"{JUDGED} and one instance of {JUDGED_BLOCKS} blocks; campaign_m25 cut to {samples} samples"
    )


def _main(what: str, samples: str, data: str | None = None) -> None:
    found = run(None if data is None else Path(data), int(samples), rates_only=what == RATES_ONLY)
    print(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
