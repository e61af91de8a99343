"""What work looks like once it is learnt, told from work that is not: who learns comes to do what was rewarded.

Members that passed are taken as the lengths to come. Hard items pass less often, and are longer, so an item counts as
much as any other: its members repeat those of its own that passed, or, where none did, those of the items nearest in
difficulty. Nothing says how fast a policy learns: the work is as learnt from the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from forge import trace as ev
from forge.scenario import Scenario
from forge.sections import DomainMix
from forge.sections_sim import Sim, SimDomain
from sim.calibrate import Calibration, match_share
from sim.fit import fit_domain, shared_variance
from sim.paths import Path, Paths, read_paths

PASSED = 0.5  # reward above which a member is one to imitate
LEAST_GROUPS = 3  # items of which several passed, below which they say nothing of what members share
SURE = 2.0  # standard errors

Members = dict[int, Path]


def as_learnt(calibration: Calibration, events: Sequence[ev.Event], scenario: Scenario) -> Calibration:
    """The calibration with every domain's turns and lengths (tokens) as they will be; `quality` says both means.

    A domain in which nobody passed stays as it is, and so do deaths and rewards.
    """
    paths = read_paths(events)
    difficulty = {e.position: e.difficulty for e in events if isinstance(e, ev.Submitted)}
    domains, quality = dict(calibration.sim.domains), dict(calibration.quality)
    for mix in scenario.domains:
        imitated = imitate(mix.name, paths, difficulty)
        if imitated is None:
            continue
        for when, some in (("seen", paths), ("learnt", imitated)):
            turns, tokens = mean_lengths(some.of(mix.name))
            quality |= {f"{when}.turns.{mix.name}": turns, f"{when}.tokens.{mix.name}": tokens}
        learnt = _lengths(domains[mix.name], fit_domain(mix.name, imitated, domains[mix.name]))
        domains[mix.name] = _shared(learnt, mix, paths, scenario)
    sim: Sim = calibration.sim.model_copy(update={"domains": domains})
    return replace(calibration, sim=sim, quality=quality)


def learns(events: Sequence[ev.Event]) -> bool:
    """Did more of the members pass that began later? One-sided, at two standard errors of the difference of halves."""
    ended = sorted((p.submitted_s, _has_passed(p)) for p in read_paths(events).all() if p.survived)
    half = len(ended) // 2
    if not half:
        return False
    first, second = fmean(won for _, won in ended[:half]), fmean(won for _, won in ended[half:])
    both = (first + second) / 2
    return second - first > SURE * math.sqrt(2 * both * (1 - both) / half)


def imitate(domain: str, paths: Paths, difficulty: dict[int, float]) -> Paths | None:
    """The domain's items with members that all passed; None where nobody did."""
    items = {i: of for i, members in paths.items.items() if (of := _of(domain, members))}
    passed = {i: won for i, members in items.items() if (won := _passed(members))}
    if not passed:
        return None
    repeated = {i: _repeat(passed.get(i) or _nearest(passed, difficulty, i), members) for i, members in items.items()}
    return Paths(repeated, {domain: paths.difficulties[domain]})


def mean_lengths(members: Sequence[Path]) -> tuple[float, float]:
    """(turns, sampled tokens) of a member that survived."""
    survivors = [m for m in members if m.survived]
    if not survivors:
        return 0.0, 0.0
    return fmean(len(m.asks) for m in survivors), fmean(m.tokens() for m in survivors)


def _of(domain: str, members: Members) -> Members:
    return {number: path for number, path in members.items() if path.domain == domain}


def _passed(members: Members) -> list[Path]:
    """In order of their number."""
    return [path for path in members.values() if _has_passed(path)]


def _has_passed(path: Path) -> bool:
    return path.done is not None and path.done.reward is not None and path.done.reward > PASSED


def _nearest(passed: dict[int, list[Path]], difficulty: dict[int, float], item: int) -> list[Path]:
    away = {i: abs(difficulty[i] - difficulty[item]) for i in passed}
    least = min(away.values())
    return [path for i, paths in passed.items() if away[i] == least for path in paths]


def _repeat(models: list[Path], members: Members) -> Members:
    return {number: models[k % len(models)] for k, number in enumerate(members)}


def _shared(model: SimDomain, mix: DomainMix, paths: Paths, scenario: Scenario) -> SimDomain:
    """With the `item_share` of those that passed, where items have several of them: repetitions share too much."""
    groups = [[math.log(max(1, p.tokens())) for p in _passed(_of(mix.name, m))] for m in paths.items.values()]
    if sum(len(group) > 1 for group in groups) < LEAST_GROUPS:
        return model
    model = model.model_copy(update={"item_share": shared_variance(groups)})
    return model.model_copy(update={"item_share": match_share(model, mix, scenario)})


def _lengths(seen: SimDomain, learnt: SimDomain) -> SimDomain:
    keys = ("turns", "turn_tokens", "tokens_median", "tokens_sigma", "tokens_cap")
    return seen.model_copy(update={key: getattr(learnt, key) for key in keys})
