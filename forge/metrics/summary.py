"""`summary.json`: one flat dict per run, the same keys in both worlds. What is not known is null, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from forge import trace as ev
from forge.metrics import efficiency, stats
from forge.metrics.conversations import Conversations
from forge.metrics.fold import ItemRecord, RunFold
from forge.metrics.intervals import gain_interval
from forge.metrics.laws import LawCheck
from forge.scenario import Scenario
from forge.types import DeathReason, Json

SCHEMA = 1

ESTIMATORS = {
    "update_variance": "mean over steps of the trainer's own figure: variance of the gradient over micro-batches",
    "plateau_distance": stats.PLATEAU,
    "nonstationarity": "standard deviation of batch means over its mean in 100 random orders; 1 is chance; the "
    "headline is the mean over features",
    "mean_shift_first_n": "first N consumed minus all consumed, in standard deviations; of domain shares half the "
    "summed differences",
    "reward": "first and last: means over the first and last 10% of the steps",
    "sample_efficiency": "reward last minus first, per trajectory consumed",
    "sample_efficiency_model": efficiency.MODEL,
    "j_tokens": "trained_tokens_per_s x sample_efficiency_model: an interval, since the model's parameters are ranges",
    "j_reward_per_s": "reward's mean over the last 10% of the steps less that over the first, per second; 95% by the "
    "scatter of those steps (Student's t)",
    "lag_versions": "trainer steps between the oldest weights that sampled a token of an item and those its step began "
    "with; over items consumed",
    "throughput_tokens_per_s": "tokens prefilled, decoded and trained, over wall_s",
    "trained_tokens_per_s": "tokens of the samples consumed, as the trainer would forward them without filtering, over "
    "wall_s; what processing drops counts",
    "forwarded_tokens_per_s": "tokens the trainer forwarded, without padding and without what processing dropped, over "
    "wall_s",
    "trainer_idle_fraction": "share of wall_s with no batch between step_started and committed",
    "cached_share": "tokens of prompts that engines found in their KV, over these and the tokens prefilled",
    "forks": "completions that did not simply go on from a reply, by reason; of trajectories that ended",
    "echoes": "replies that came back in a later request, by how they differed from what was sampled; exact: not",
    "engine_idle_fraction": "1 - busy seconds of all instances over wall_s x instances",
}

FEATURES: dict[str, Callable[[ItemRecord], float | None]] = {
    "log_length": lambda item: None if item.tokens is None else float(np.log(max(1, item.tokens))),
    "duration_s": lambda item: None if item.finished_s is None else item.finished_s - item.submitted_s,
    "difficulty": lambda item: item.difficulty,
}


class Figures:
    """A dict under construction: a null never enters without its reason."""

    def __init__(self) -> None:
        self.values: Json = {}
        self.reasons: dict[str, str] = {}

    def put(self, key: str, value: object, why_null: str = "") -> None:
        self.values[key] = value
        if value is None:
            self.reasons[key] = why_null
        elif isinstance(value, dict):
            self.reasons |= {f"{key}.{part}": why_null for part, inner in value.items() if inner is None}


def summarise(events: Iterable[ev.Event], scenario: Scenario) -> Json:
    """The content of `summary.json` from a trace of either world. A pure function of its arguments."""
    run, laws = RunFold(), LawCheck(scenario.shape(), scenario.queue.concurrency, scenario.engine.instances)
    talk = Conversations()
    for event in events:
        run.apply(event)
        laws.apply(event)
        talk.apply(event)
    return figures(run, laws, scenario, talk)


def figures(run: RunFold, laws: LawCheck, scenario: Scenario, talk: Conversations | None = None) -> Json:
    """`summarise` for events already folded. `talk` None: of a world that sees no requests."""
    out = Figures()
    out.values |= {"schema": SCHEMA, "world": run.world, "scenario": scenario.name, "seed": run.seed}
    out.values |= {"wall_s": run.wall_s, "ended": run.ended or "killed", "lives": 1 + len(run.resumed_s)}
    _counts(out, run)
    _throughput(out, run)
    _parts(out, run, scenario.engine.instances)
    _lag(out, run, laws, scenario)
    _nonstationarity(out, run, scenario.queue.n)
    _reward(out, run)
    _yield(out, run.world)
    _intervals_of_j(out, run.world, scenario)
    seen = talk is not None and talk.members > 0
    for key in ("forks", "echoes"):
        out.put(key, dict(getattr(talk, key)) if seen else None, "the trace tells of no agents' requests")
    out.values["estimators"] = ESTIMATORS
    more = laws.broken - len(laws.violations)
    out.values["law_violations"] = laws.violations + ([f"and {more} more"] if more else [])
    out.values["null_reasons"] = out.reasons
    return out.values


def _counts(out: Figures, run: RunFold) -> None:
    consumed = run.consumed()
    # Without a word on its members (a life's trace was lost) every member of an item counts.
    samples = sum(len(item.survivors) or item.members or 1 for item in consumed)
    dead: dict[str, int] = {reason.value: 0 for reason in DeathReason}
    for item in run.items.values():
        if item.dead_s is not None:
            dead[item.reason or "unknown"] = dead.get(item.reason or "unknown", 0) + 1
    out.values |= {
        "items_submitted": len(run.items),
        "items_consumed": len(consumed),
        "samples_consumed": samples,
        "items_parked": sum(item.parked_s is not None for item in run.items.values()),
        "dead": dead,
        "steps": run.step,
        "versions": run.version,
    }


def _throughput(out: Figures, run: RunFold) -> None:
    """Trained tokens are those of all samples consumed; what processing drops before the forward pass counts too."""
    trained = sum(s.tokens for s in run.steps)
    no_usage = "the trace holds no usage event, so prefilled and decoded tokens are unknown"
    tokens = {
        "prefill": run.prefill_tokens if run.usage else None,
        "decode": run.decode_tokens if run.usage else None,
        "trained": trained,
    }
    rates = {part: None if n is None or run.wall_s <= 0 else n / run.wall_s for part, n in tokens.items()}
    known = [rate for rate in rates.values() if rate is not None]
    why = no_usage if run.wall_s > 0 else "the run has no duration"
    out.put("throughput_tokens_per_s", sum(known) if len(known) == len(rates) else None, why)
    out.put("throughput_parts", rates, why)
    for key, amount in (
        ("sampled_tokens_per_s", run.sampled_tokens),
        ("trained_tokens_per_s", trained),
        ("items_per_s", len(run.consumed())),
    ):
        out.put(key, amount / run.wall_s if run.wall_s > 0 else None, "the run has no duration")
    forwarded = [n for s in run.steps if (n := s.metrics.get("forward_tokens")) is not None]
    complete = bool(forwarded) and len(forwarded) == len(run.steps) and run.wall_s > 0
    unknown = "the simulator processes no samples" if run.world == "sim" else "not every step reported forward_tokens"
    out.put("forwarded_tokens_per_s", sum(forwarded) / run.wall_s if complete else None, unknown)
    found, computed = run.cached_tokens, run.prefill_tokens
    share = None if found is None or not found + computed else found / (found + computed)
    out.put("cached_share", share, "the trace's usage events count no cached tokens, or no prompt was computed")


def _parts(out: Figures, run: RunFold, instances: int) -> None:
    """Seconds of each part, summed over instances; and how idle engines and trainer were."""
    parts = {
        "rollout": run.busy_s if run.usage else None,
        "training": sum(s.train_s for s in run.steps),
        "data": sum(s.data_s for s in run.steps),
        "io": sum(s.io_s for s in run.steps) + run.load_s,
    }
    out.put("parts", parts, "the trace holds no usage event")
    wall = run.wall_s
    measured = bool(run.usage) and wall > 0
    busy = run.busy_s / (wall * instances) if measured else 0.0
    out.put("engine_idle_fraction", 1.0 - busy if measured else None, "no usage event, or no duration")
    trained = sum(end - start for start, end in run.trainer_spans)
    out.put("trainer_idle_fraction", 1.0 - trained / wall if wall > 0 else None, "the run has no duration")
    out.values["refused"] = run.refused
    out.put("ttft_s", stats.percentiles(run.ttft_s), "no request got a first token")
    out.put("tpot_s", stats.percentiles(run.tpot_s), "no request sampled two tokens")


def _lag(out: Figures, run: RunFold, laws: LawCheck, scenario: Scenario) -> None:
    consumed = run.consumed()
    items = [item.lag_items for item in consumed if item.lag_items is not None]
    steps = [laws.lag_steps[item.position] for item in consumed if item.position in laws.lag_steps]
    shape = scenario.shape()
    none, unbounded = "no item was consumed", f"{scenario.policy.scheduler.kind} has no window, so no bound"
    out.put("lag_items_max", max(items, default=None), none)
    out.put("lag_items_mean", sum(items) / len(items) if items else None, none)
    out.put("lag_items_bound", shape.lag_items_bound, unbounded)
    versions = [lag for item in consumed if (lag := item.lag_versions) is not None]
    stale = {"mean": sum(versions) / len(versions), "max": max(versions)} if versions else None
    out.put("lag_versions", stale, "the trace holds no request of an item that was consumed")
    out.put("lag_steps_max", max(steps, default=None), none)
    out.put("lag_steps_bound", shape.lag_steps_bound, unbounded)
    out.values["overtakes_max"] = laws.overtakes_max


def _nonstationarity(out: Figures, run: RunFold, n: int) -> None:
    batches = run.batches()
    ratios: dict[str, float | None] = {}
    shifts: dict[str, float | None] = {}
    for name, feature in FEATURES.items():
        known = [[v for item in batch if (v := feature(item)) is not None] for batch in batches]
        known = [values for values in known if values]
        flat = np.array([v for values in known for v in values], dtype=np.float64)
        ratios[name] = stats.spread_ratio(flat, [len(v) for v in known]) if known else None
        shifts[name] = stats.mean_shift(flat, n)
    shares = _domain_shares(batches)
    ratios["domain_share"] = stats.spread_ratio(shares, [len(b) for b in batches]) if batches else None
    shifts["domain_share"] = stats.mean_shift(shares, n)
    given = [r for r in ratios.values() if r is not None]
    too_few = "fewer than two steps, or it does not vary"
    out.put("nonstationarity", float(np.mean(given)) if given else None, too_few)
    out.put("nonstationarity_features", ratios, too_few)
    out.put("mean_shift_first_n", shifts, f"at most N = {n} items consumed, or it does not vary")
    ended = [
        i for i in run.items.values() if i.tokens is not None and (i.dead_s is not None or i.finished_s is not None)
    ]
    lost = [i.dead_s is not None for i in ended]
    shares_lost = stats.share_by_quartile([i.tokens or 0 for i in ended], lost)
    quartiles = {f"q{q + 1}": share for q, share in enumerate(shares_lost)}
    out.put("death_share_by_length_quartile", quartiles, "no item ended in this quartile")


def _domain_shares(batches: list[list[ItemRecord]]) -> stats.Array:
    """One row an item in the order consumed, one column a domain: 1 where it is of that domain."""
    domains = [item.domain for batch in batches for item in batch]
    names = sorted(set(domains))
    table = np.array([[float(d == name) for name in names] for d in domains], dtype=np.float64)
    return table.reshape(len(domains), len(names))


def _reward(out: Figures, run: RunFold) -> None:
    curve: list[list[float]] = []
    for step in run.steps:
        batch = [run.items[p].reward for p in step.positions if p in run.items]
        found = [reward for reward in batch if reward is not None]
        if found:
            curve.append([step.committed_s, step.step, sum(found) / len(found)])
    rewards = [point[2] for point in curve]
    ends = stats.ends_mean(rewards)
    first, last, window = ends or (None, None, 0)
    reward = {"first": first, "last": last, "window_steps": window, "curve": curve}
    out.put("reward", reward, "no step with a reward was committed")
    held_out = [{"t": e.t, "step": e.step, "label": e.label, "mean": e.mean, "tasks": e.tasks} for e in run.evaluations]
    out.values["held_out"] = held_out
    variances = [v for s in run.steps if (v := s.metrics.get("update_variance")) is not None]
    out.put(
        "update_variance",
        float(np.mean(variances)) if variances else None,
        "the simulator computes no gradient" if run.world == "sim" else "no step reported one",
    )
    distance = None if run.world == "sim" else stats.plateau_distance(rewards)
    short = f"fewer than {stats.PLATEAU_STEPS} steps"
    out.put("plateau_distance", distance, _no_learning(run.world, short))


def _yield(out: Figures, world: str) -> None:
    """J = throughput x sample efficiency (DESIGN section 1), and gain per second, which verbosity cannot inflate."""
    values = out.values
    reward, samples, wall = values["reward"], values["samples_consumed"], values["wall_s"]
    known = world != "sim" and reward["first"] is not None
    gain = reward["last"] - reward["first"] if known else None
    why = _no_learning(world, "no step with a reward was committed")
    out.put("reward_gain", gain, why)
    out.put("sample_efficiency", gain / samples if gain is not None and samples else None, why)
    out.put("reward_gain_per_s", gain / wall if gain is not None and wall > 0 else None, why)
    efficiency, throughput = values["sample_efficiency"], values["throughput_tokens_per_s"]
    if efficiency is not None and throughput is None:
        why = out.reasons["throughput_tokens_per_s"]
    both = efficiency is not None and throughput is not None
    out.put("yield_J", efficiency * throughput if both else None, why)


def _intervals_of_j(out: Figures, world: str, scenario: Scenario) -> None:
    """J in trained tokens under the stated model, in both worlds; J in reward where one was learnt."""
    values = out.values
    lag, unrest, speed = (values[key] for key in ("lag_items_mean", "nonstationarity", "trained_tokens_per_s"))
    model, j = None, None
    if lag is not None and unrest is not None and speed is not None:
        low, high = efficiency.bounds(scenario.efficiency, lag / scenario.queue.batch, unrest)
        model, j = {"low": low, "high": high}, {"low": low * speed, "high": high * speed}
    missing = "needs lag_items_mean, nonstationarity and trained_tokens_per_s"
    out.put("sample_efficiency_model", model, missing)
    out.put("j_tokens", j, missing)
    curve, window, wall = values["reward"]["curve"], values["reward"]["window_steps"], values["wall_s"]
    gain = None
    if world != "sim" and window and wall > 0:
        rewards = [mean / wall for _, _, mean in curve]
        gain = gain_interval(rewards[:window], rewards[-window:]).to_dict()
    few = "one step at each end has no spread" if window else "no step with a reward was committed"
    out.put("j_reward_per_s", gain, _no_learning(world, few))


def _no_learning(world: str, otherwise: str) -> str:
    if world != "sim":
        return otherwise
    return "the simulator draws rewards at a fixed rate: it models time, not learning, until fitted from live runs"
