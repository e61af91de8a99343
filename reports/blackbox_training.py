"""Does training on an agent program of others, never changed, raise its reward? And on one that soon forgets?

    .venv/bin/python reports/blackbox_training.py [--steps 14] [--tasks 30] [--runs runs/blackbox_training]

`scenarios/quickstart_blackbox.toml` with openai-agents as it comes, and with the same program cutting its context down
to its task and the newest call before every request. What is on disk under --runs is not made again. Writes
reports/blackbox_training/: results.json, results.md, reward.png. First `forge blackbox install openai-agents`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "blackbox_training"
AGENTS = ("openai-agents", "openai-agents-truncating")
DOMAINS = ("calc", "shop")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=14)
    arguments.add_argument("--tasks", type=int, default=30)
    arguments.add_argument("--runs", type=Path, default=Path("runs/blackbox_training"))
    given = arguments.parse_args()
    write([row(agent, trained(agent, given)) for agent in AGENTS])


def trained(agent: str, given: argparse.Namespace) -> Path:
    """The run's folder."""
    root = given.runs / agent
    latest = root / "latest"
    if not (latest / "summary.json").is_file():
        domains = ",".join(f'{{name="{name}",agent="{agent}"}}' for name in DOMAINS)
        sets = [f"domains=[{domains}]", f"stop={{steps={given.steps}}}", f"eval.tasks={given.tasks}"]
        options = [part for one in sets for part in ("--set", one)]
        command = [sys.executable, "-m", "forge", "run", "quickstart_blackbox", "--runs", str(root), *options]
        subprocess.run(command, check=True)
    return latest.resolve()


def row(agent: str, run: Path) -> dict[str, Any]:
    from forge.metrics.intervals import paired_interval
    from forge.runs import RunFolder

    folder = RunFolder.open(run)
    summary, evaluation, meta = (folder.read(f"{name}.json") for name in ("summary", "evaluation", "meta"))
    assert summary is not None
    assert meta is not None
    found: dict[str, Any] = {
        "agent": agent,
        "steps": summary["steps"],
        "seconds": summary["wall_s"],
        "trajectories": summary["samples_consumed"],
        "dead": sum(summary["dead"].values()),
        "forks": summary["forks"],
        "echoes": summary["echoes"],
        "curve": [reward for _, _, reward in summary["reward"]["curve"]],
        "machine": meta["machine"],
        "held_out": None,
    }
    if evaluation:
        gain = paired_interval(evaluation["start"]["scores"], evaluation["end"]["scores"])
        ends = {when: evaluation[when]["mean"] for when in ("start", "end")}
        found["held_out"] = ends | {"tasks": gain.n, "gain": gain.to_dict()}
    return found


def write(rows: list[dict[str, Any]]) -> None:
    from forge.runs import write_json, write_text

    HERE.mkdir(exist_ok=True)
    write_json(HERE / "results.json", {"rows": rows})
    lines = [
        "# Training on a program of others",
        "",
        f"{rows[0]['machine']['processor']}, {rows[0]['machine']['cores']} cores. Made by `python "
        "reports/blackbox_training.py`: openai-agents, every trajectory a process in a sandbox, on calc and shop with "
        "their verifiers. The truncating one is shown its task and the newest call with its result.",
        "",
        "| program | steps | trajectories | dead | seconds | first third of steps | last third | held out, greedy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        third = max(1, len(one["curve"]) // 3)
        first, last = (sum(part) / len(part) for part in (one["curve"][:third], one["curve"][-third:]))
        numbers = [
            one["steps"],
            one["trajectories"],
            one["dead"],
            f"{one['seconds']:.0f}",
            f"{first:.2f}",
            f"{last:.2f}",
        ]
        lines.append(f"| {one['agent']} | " + " | ".join(map(str, numbers)) + f" | {_held_out(one)} |")
    lines += [
        "",
        *(f"- {one['agent']}: forks {json.dumps(one['forks'])}, echoes {json.dumps(one['echoes'])}" for one in rows),
    ]
    write_text(HERE / "results.md", "\n".join(lines) + "\n")
    picture(rows)
    print(HERE / "results.md")


def _held_out(one: dict[str, Any]) -> str:
    found = one["held_out"]
    if found is None:
        return "not scored"
    bounds = f"[{found['gain']['low']:+.2f}, {found['gain']['high']:+.2f}]"
    return f"{found['start']:.2f} to {found['end']:.2f}, gain {bounds}, {found['tasks']} tasks"


def picture(rows: list[dict[str, Any]]) -> None:
    import matplotlib as mpl

    from forge.report.drawing import BLUE, ORANGE, STYLE, axes_of

    with mpl.rc_context(STYLE):
        figure, (ax,) = axes_of(1, 3.2)
        for one, colour in zip(rows, (BLUE, ORANGE), strict=True):
            steps = range(1, len(one["curve"]) + 1)
            ax.plot(steps, one["curve"], "o-", ms=3, color=colour, label=one["agent"])
        ax.set(
            xlabel="trainer step (16 trajectories each)", ylabel="mean reward", title="Programs of others, trained on"
        )
        ax.set_ylim(0, 1)
        ax.legend()
        figure.savefig(HERE / "reward.png", dpi=130)


if __name__ == "__main__":
    main()
