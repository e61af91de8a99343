"""Is what was chosen better than what the scenario has? Asked of seeds that the choice never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.metrics.intervals import Interval, mean_interval
from sim.choose import LAG, OBJECTIVES, SPEED, UNREST, WAIT, Judged
from sim.measure import Figures, intervals

#: what may decide where throughput does not
OTHERS = {UNREST: "less non-stationary", LAG: "less lag", WAIT: "a shorter p99 time to first token"}


@dataclass(frozen=True, slots=True)
class Validation:
    """The chosen policy and the scenario's own on held-out seeds. `gains`: chosen less own, seed by seed (Student's t,
    95%); without an objective that a run is too short to have. `adopt`: the chosen one is what is written."""

    seeds: tuple[int, ...]
    chosen: dict[str, Interval]
    own: dict[str, Interval]
    gains: dict[str, Interval]
    adopt: bool
    verdict: str


def validate(
    seeds: Sequence[int], chosen: Judged, own: Judged, runs: Sequence[Figures], own_runs: Sequence[Figures]
) -> Validation:
    """`runs`, `own_runs`: on the held-out seeds, in their order; empty where one came to nothing."""
    if len(runs) < len(seeds) or len(own_runs) < len(seeds):
        text = "A held-out run came to nothing, so nothing is known of the choice: the scenario's own policy is kept."
        return Validation(tuple(seeds), {}, {}, {}, adopt=False, verdict=text)
    both = list(zip(runs, own_runs, strict=True))
    keys = [key for key in OBJECTIVES if all(key in figures for pair in both for figures in pair)]
    gains = {key: mean_interval([a[key] - b[key] for a, b in both]) for key in keys}
    of, owned = intervals(runs), intervals(own_runs)
    adopt, verdict = _verdict(chosen, own, gains, owned[SPEED].mean)
    return Validation(tuple(seeds), of, owned, gains, adopt, verdict)


def _verdict(chosen: Judged, own: Judged, gains: dict[str, Interval], base: float) -> tuple[bool, str]:
    speed = gains[SPEED]
    measured = f"{_share(speed, base)} trained tokens/s on {speed.n} held-out seeds"
    if chosen.candidate == own.candidate:
        return False, "The scenario's own policy is the best that was tried: it is kept."
    if own.reason is not None:
        return True, f"The scenario's own policy is out of bounds ({own.reason}); the tuned one has {measured}."
    better = [text for key, text in OTHERS.items() if key in gains and gains[key].high < 0]
    better += ["fewer devices"] if chosen.candidate.devices < own.candidate.devices else []
    beside = f"; {', '.join(better)}" if better else ""
    if speed.low > 0:
        return True, f"The tuned policy beats the scenario's own: {measured}{beside}."
    if speed.high < 0 and chosen.candidate.devices >= own.candidate.devices:
        return False, f"The tuned policy is slower than the scenario's own ({measured}): the scenario's own is kept."
    if better:
        return True, f"The tuned policy is not told apart in speed ({measured}), and has {', '.join(better)}."
    return False, f"The defaults are as good ({measured}, nothing else better): the scenario's own policy is kept."


def _share(gain: Interval, base: float) -> str:
    if base <= 0 or not gain.is_bounded:
        return f"{gain.mean:+.4g}"
    return f"{gain.mean / base:+.1%} [{gain.low / base:+.1%}, {gain.high / base:+.1%}]"
