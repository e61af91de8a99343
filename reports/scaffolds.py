"""Does training in many scaffolds help in scaffolds never met? The quickstart trained in one, and in twelve.

    .venv/bin/python reports/scaffolds.py [--seeds 3] [--items 400] [--tasks 60] [--runs runs/scaffolds]

Same model, tasks and number of items; only `agents.scaffolds` differs. Every trained model, and the one they begin
with, is scored by `forge eval` on the same frozen held-out tasks in the same scaffolds. What is on disk under --runs is
not made again, so that a stopped report goes on. Writes reports/scaffolds/: results.json, results.md, scores.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "scaffolds"
ONE = "plain/native/all/bare"
MANY = [
    ONE,
    "single/native/all/bare",
    "retry/native/all/bare",
    "plain/native/window-2/bare",
    "plain/native/fold-1/bare",
    "plain/native/drop-1/bare",
    "single/native/drop-1/bare",
    "plain/hermes~bare/all/bare",
    "plain/hermes~equals/all/bare",
    "single/hermes~bare/window-2/bare",
    "retry/hermes~equals/fold-1/bare",
    "retry/native/window-2/bare",
]
SETS = {"one": [ONE], "many": MANY}
#: where models are scored, by what of it training in many has seen
GROUPS = {
    "the one": [ONE],
    "others of the twelve": ["single/native/all/bare", "plain/hermes~bare/all/bare", "plain/native/fold-1/bare"],
    "known parts, new together": [
        "single/hermes~equals/window-2/bare",
        "retry/hermes~bare/drop-1/bare",
        "single/native/fold-1/bare",
        "plain/hermes~equals/drop-1/bare",
    ],
    "a new context strategy": ["plain/native/extract-1/bare", "plain/native/cut-16/bare", "plain/native/window-4/bare"],
    "a new dialect": ["plain/hermes~named/all/bare", "single/hermes~named/all/bare"],
    "a new loop": ["reflect/native/all/bare", "vote/native/all/bare", "plan/native/all/bare"],
    "a new prompt": ["plain/native/all/terse", "plain/native/all/suffix", "plain/native/all/prefix"],
}
HELD_OUT = [
    name for group, names in GROUPS.items() if group not in ("the one", "others of the twelve") for name in names
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--items", type=int, default=400)
    arguments.add_argument("--tasks", type=int, default=60)
    arguments.add_argument("--runs", type=Path, default=Path("runs/scaffolds"))
    given = arguments.parse_args()
    scores = {"start": [evaluated("quickstart", given.runs / "start", given.tasks)]}
    spent: dict[str, list[dict[str, Any]]] = {}
    for name, scaffolds in SETS.items():
        for seed in range(given.seeds):
            root = given.runs / f"{name}-{seed}-{given.items}"
            run = trained(scaffolds, seed, given.items, root)
            spent.setdefault(name, []).append(json.loads((run / "summary.json").read_text()))
            scores.setdefault(name, []).append(evaluated(str(run), root / "eval", given.tasks))
    write(scores, spent, given)


def trained(scaffolds: list[str], seed: int, items: int, root: Path) -> Path:
    """The run's folder."""
    latest = root / "latest"
    if not (latest / "summary.json").is_file():
        chosen = ",".join(f'"{name}"' for name in scaffolds)
        sets = [f"seed={seed}", f"stop={{items={items}}}", "eval.tasks=0", f"agents.scaffolds=[{chosen}]"]
        options = [part for one in sets for part in ("--set", one)]
        forge("run", "quickstart", "--runs", str(root), *options)
    return latest.resolve()


def evaluated(model: str, root: Path, tasks: int) -> dict[str, Any]:
    """What `scores.json` holds."""
    found = sorted(root.glob("*/scores.json"))
    if not found:
        names = ",".join(name for group in GROUPS.values() for name in group)
        forge("eval", model, "--runs", str(root), "--tasks", str(tasks), "--scaffolds", names)
        found = sorted(root.glob("*/scores.json"))
    scores: dict[str, Any] = json.loads(found[-1].read_text())
    return scores


def forge(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "forge", *arguments], check=True)


def mean_in(scores: dict[str, Any], scaffolds: list[str]) -> float:
    of = [value for name in scaffolds for value in scores["scores"][name].values()]
    return sum(of) / len(of)


def write(scores: dict[str, list[dict[str, Any]]], spent: dict[str, Any], given: argparse.Namespace) -> None:
    from forge.metrics.intervals import mean_interval
    from forge.runs import write_json, write_text

    groups = GROUPS | {"all of these new ones": HELD_OUT}
    rows = []
    for group, names in groups.items():
        means = {kind: [mean_in(one, names) for one in of] for kind, of in scores.items()}
        gains = [many - one for one, many in zip(means["one"], means["many"], strict=True)]
        rows.append({"group": group, "scaffolds": len(names), **means, "gain": mean_interval(gains).to_dict()})
    spreads = {
        kind: [one["spread"]["sd"] for one in of if one["spread"]] for kind, of in scores.items() if kind != "start"
    }
    result = {
        "items": given.items,
        "tasks": given.tasks,
        "rows": rows,
        "spread": spreads,
        "tokens": {kind: [one["trained_tokens_per_s"] * one["wall_s"] for one in of] for kind, of in spent.items()},
        "sets": SETS,
        "groups": GROUPS,
    }
    HERE.mkdir(parents=True, exist_ok=True)
    write_json(HERE / "results.json", result)
    write_text(HERE / "results.md", table(result, given.seeds))
    picture(rows)
    print(HERE / "results.md")


def table(result: dict[str, Any], seeds: int) -> str:
    tokens = {kind: sum(of) / len(of) for kind, of in result["tokens"].items()}
    spread = {kind: sum(of) / len(of) for kind, of in result["spread"].items()}
    lines = [
        "# Training in many scaffolds",
        "",
        f"Made by `python reports/scaffolds.py --items {result['items']} --tasks {result['tasks']}`, {seeds} seeds. "
        f"The quickstart's model is trained on {result['items']} items in one scaffold (`{ONE}`), or in twelve of "
        f"which each item draws one; {tokens['one']:,.0f} and {tokens['many']:,.0f} tokens trained. Scored greedily on "
        f"the same {result['tasks']} held-out tasks in every scaffold. Gain: many minus one, mean over seeds with "
        f"Student's 95% interval.",
        "",
        "| scaffolds | how many | untrained | trained in one | trained in many | gain | 95% interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        one, many = (" / ".join(f"{value:.3f}" for value in row[kind]) for kind in ("one", "many"))
        gain = row["gain"]
        bounds = "" if gain["low"] is None else f"[{gain['low']:+.3f}, {gain['high']:+.3f}]"
        lines.append(
            f"| {row['group']} | {row['scaffolds']} | {row['start'][0]:.3f} | {one} | {many} | {gain['mean']:+.3f} | "
            f"{bounds} |"
        )
    lines += [
        "",
        f"Standard deviation between the scaffolds' means: {spread['one']:.3f} trained in one, {spread['many']:.3f} in "
        f"many.",
        "",
        *(f"- {group}: {', '.join(f'`{name}`' for name in names)}" for group, names in result["groups"].items()),
    ]
    return "\n".join(lines) + "\n"


def picture(rows: list[dict[str, Any]]) -> None:
    import matplotlib as mpl

    from forge.report.drawing import BLUE, GREY, ORANGE, STYLE, axes_of

    with mpl.rc_context(STYLE):
        figure, (ax,) = axes_of(1, 4.2)
        colours = {"start": GREY, "one": ORANGE, "many": BLUE}
        labels = {"start": "untrained", "one": "trained in one scaffold", "many": "trained in twelve"}
        for shift, (kind, colour) in zip((-0.25, 0.0, 0.25), colours.items(), strict=True):
            places = [place + shift for place in range(len(rows))]
            heights = [sum(row[kind]) / len(row[kind]) for row in rows]
            ax.bar(places, heights, width=0.22, color=colour, label=labels[kind])
            for place, row in zip(places, rows, strict=True):
                ax.plot([place] * len(row[kind]), row[kind], "o", ms=3, color="black", alpha=0.6)
        ax.set_xticks(range(len(rows)), [row["group"].replace(" ", "\n", 1) for row in rows], fontsize=7)
        ax.set(ylabel="mean reward, held-out tasks", title="Scored in scaffolds met and never met; a dot a seed")
        ax.set_ylim(0, 1)
        ax.legend()
        figure.savefig(HERE / "scores.png", dpi=130)


if __name__ == "__main__":
    main()
