"""What tuning writes: the policy, every candidate, a report and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge.report.page import number
from forge.runs import write_text
from forge.scenario import policy_toml
from sim.certainty import importances
from sim.choose import OBJECTIVES, Judged, ranges_of_j
from sim.pareto import plot_front, plot_importances
from sim.sensitivity import plot
from sim.tune import Tuned, span

FRONT, WEIGHT, CURVES = "pareto.png", "importance.png", "sensitivity.png"

#: how the reason begins of one that the search gave up
DROPPED = "dropped"


def write(tuned: Tuned, policy: Path, command: str = "", note: str = "") -> list[Path]:
    """`policy` itself, and beside it `tune.json`, `tune.md` and the pictures. The same tuning gives the same bytes."""
    policy.parent.mkdir(parents=True, exist_ok=True)
    table, report = policy.with_name("tune.json"), policy.with_name("tune.md")
    pictures = [policy.with_name(name) for name in (FRONT, WEIGHT, CURVES)]
    best, weights = tuned.choice.chosen, importances(tuned.judged)
    plot_front(tuned, pictures[0])
    plot_importances(weights, pictures[1])
    title = f"{tuned.scenario.name}: {_name(best)} chosen"
    plot(tuned.judged, best, title, pictures[2])
    write_text(table, json.dumps(to_dict(tuned, command), indent=2) + "\n")
    write_text(report, "\n".join(_lines(tuned, command, note, weights)) + "\n")
    comment = tuned.why() + (f"\nMade by: {command}" if command else "")
    write_text(policy, policy_toml(tuned.scenario.policy, tables(tuned), comment))
    return [policy, table, report, *pictures]


def tables(tuned: Tuned) -> dict[str, Any]:
    """What a policy file holds beside the slots: the queue's numbers, and the fleet where that was tuned."""
    queue = tuned.scenario.queue
    held: dict[str, Any] = {"queue": {"n": queue.n, "concurrency": queue.concurrency}}
    if tuned.own_n_follows:
        held["queue"]["n_from_lag_budget"] = False
    for path, value in tuned.adopted.candidate.point:
        *parts, key = path.split(".")
        if parts[0] not in ("policy", "queue"):
            table = held
            for part in parts:
                table = table.setdefault(part, {})
            table[key] = value
    return held


def to_dict(tuned: Tuned, command: str = "") -> dict[str, Any]:
    by_j, checked = tuned.choice.by_j, tuned.validation
    return {
        "scenario": tuned.scenario.name,
        "command": command,
        "seeds": list(tuned.seeds),
        "objective": tuned.why(),
        "budgets": {"nonstationarity": tuned.budgets.nonstationarity, "lag_items": tuned.budgets.lag_items},
        "sample_efficiency": tuned.scenario.efficiency.model_dump(mode="json"),
        "space": {one.path: str(one) for one in tuned.space.dimensions},
        "chosen": _row(tuned.choice.chosen),
        "own": _row(tuned.own),
        "adopted": _row(tuned.adopted),
        "held_out": {
            "seeds": list(checked.seeds),
            "verdict": checked.verdict,
            "adopt": checked.adopt,
            "gains": {key: value.to_dict() for key, value in checked.gains.items()},
            "chosen": {key: value.to_dict() for key, value in checked.chosen.items()},
            "own": {key: value.to_dict() for key, value in checked.own.items()},
        },
        "chosen_again": [{"set": dict(one.candidate.point), "share": share} for one, share in tuned.again],
        "importance": importances(tuned.judged),
        "best_by_j": None if by_j is None else _row(by_j),
        "best_by_j_reason": "its interval lies above all others" if by_j else "intervals overlap: no winner by J",
        "illegal_points": tuned.illegal,
        "candidates": [_row(j) for j in tuned.judged],
    }


def _row(judged: Judged) -> dict[str, Any]:
    c = judged.candidate
    return {
        "set": dict(c.point),
        "n": c.n,
        "concurrency": c.concurrency,
        "window": c.window,
        "devices": c.devices,
        "lag_items_bound": c.lag_bound,
        "seeds_run": len(judged.runs),
        "feasible": judged.feasible,
        "infeasible_reason": judged.reason,
        "pareto": judged.pareto,
        "figures": {key: value.to_dict() for key, value in judged.figures.items()},
        "j_interval": None if judged.j is None else list(judged.j),
    }


def _name(judged: Judged) -> str:
    c = judged.candidate
    return f"{'no window' if c.window is None else f'W = {c.window}'} of N = {c.n}, C = {c.concurrency}"


# --- the report ------


def _lines(tuned: Tuned, command: str, note: str, weights: dict[str, dict[str, float]]) -> list[str]:
    return [
        f"# Tuning {tuned.scenario.name}",
        "",
        *(f"{line}  " for line in tuned.why().splitlines()),
        "",
        *([f"Made by `{command}`; the same command after a kill goes on where it was.", ""] if command else []),
        *([note, ""] if note else []),
        "N: items that may be under way or wait, W: those of them from the oldest on that may be trained on, C: items "
        "under way at once. Lag bound: the most items that can be trained on between an item's weights and itself. J: "
        "trained tokens/s times sample efficiency, which is a model with the ranges of the scenario's `[efficiency]`.",
        "",
        *_held_out(tuned),
        *_front(tuned),
        *_certainty(tuned),
        *_weights(weights),
        "## All candidates against the queue's numbers and every key",
        "",
        f"![sensitivity]({CURVES})",
    ]


def _held_out(tuned: Tuned) -> list[str]:
    checked = tuned.validation
    lines = [
        "## On seeds that the choice never saw",
        "",
        f"Seeds {span(checked.seeds)}; gain: chosen less own, paired by seed, 95% (Student's t).",
        "",
        "| figure | the scenario's own | chosen | gain |",
        "|---|---|---|---|",
    ]
    for key, gain in checked.gains.items():
        bounds = f"{number(gain.mean)} [{number(gain.low)}, {number(gain.high)}]"
        label = OBJECTIVES[key][0]
        lines.append(f"| {label} | {number(checked.own[key].mean)} | {number(checked.chosen[key].mean)} | {bounds} |")
    return [*lines, ""]


def _front(tuned: Tuned) -> list[str]:
    front = [j for j in tuned.judged if j.pareto]
    lines = [
        "## What can be traded for what",
        "",
        f"{len(tuned.judged)} candidates; {len(front)} of those run on all seeds are beaten by none in everything:",
        "",
        f"| set | {' | '.join(label for label, _ in OBJECTIVES.values())} | lag bound | devices | J | may be chosen |",
        f"|---|{'---|' * (len(OBJECTIVES) + 4)}",
    ]
    for one in sorted(front, key=lambda j: -j.figures[next(iter(OBJECTIVES))].mean):
        c = one.candidate
        cells = [tuned.space.label(c.point), *(number(one.figures[key].mean) for key in OBJECTIVES)]
        j = "unknown" if one.j is None else f"{number(one.j[0])} to {number(one.j[1])}"
        cells += [number(c.lag_bound), str(c.devices), j, one.reason or "yes"]
        lines.append(f"| {' | '.join(cells)} |")
    winner = tuned.choice.by_j
    by_j = (
        f"By J the best is {tuned.space.label(winner.candidate.point)}: its interval lies above all others."
        if winner
        else _no_winner(tuned)
    )
    return [*lines, "", by_j, "", f"![Pareto front]({FRONT})", ""]


def _no_winner(tuned: Tuned) -> str:
    known = [j for j, _ in ranges_of_j(tuned.judged)]
    low = max(j[0] for j in known)
    overlap = sum(j[1] >= low for j in known)
    return (
        f"By J there is no winner: the intervals of {overlap} candidates overlap, since sample efficiency is a model "
        f"whose parameters are ranges until live runs fit it ([efficiency])."
    )


def _certainty(tuned: Tuned) -> list[str]:
    lines = [
        "## How sure the choice is",
        "",
        "Chosen when the seeds are drawn anew with replacement (200 times; few seeds make it too sure of itself):",
        "",
        *(f"- {share:.0%}: {tuned.space.label(one.candidate.point)}" for one, share in tuned.again[:5]),
    ]
    dropped = sum(1 for one in tuned.judged if len(one.runs) < len(tuned.seeds))
    worse = sum(
        1 for one in tuned.judged if len(one.runs) == len(tuned.seeds) and (one.reason or "").startswith(DROPPED)
    )
    text = (
        f"{dropped} candidates were dropped before they met all seeds, {worse} more for the same reasons once they had"
    )
    return [*lines, "", f"{text}; tune.json says why.", ""]


def _weights(weights: dict[str, dict[str, float]]) -> list[str]:
    paths = list(dict.fromkeys(path for shares in weights.values() for path in shares))
    if not paths:
        return []
    lines = [
        "## Which keys mattered",
        "",
        "Share of the variance between candidates that a key explains alone (omega squared; what is missing to 100% is "
        "interplay and chance).",
        "",
        f"| key | {' | '.join(label for label, _ in OBJECTIVES.values())} |",
        f"|---|{'---|' * len(OBJECTIVES)}",
    ]
    for path in paths:
        shares = (weights[key].get(path) for key in OBJECTIVES)
        lines.append(f"| {path} | {' | '.join('' if s is None else f'{s:.0%}' for s in shares)} |")
    return [*lines, "", f"![importance]({WEIGHT})", ""]
