"""Does the quickstart learn, whatever the seed? Runs it for several seeds and puts them side by side.

    .venv/bin/python reports/quickstart.py [--seeds 3] [--runs runs] [--note "what else ran on the machine"]

Writes reports/quickstart/: results.json, results.md, and the reward curve of every seed (reward.png). With --only-read
it makes the tables again from run folders given as arguments. Three seeds take about 25 minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "quickstart"
FIRST_S, LATER_S = 10.0, 60.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--runs", type=Path, default=Path("runs"))
    arguments.add_argument("--only-read", nargs="+", type=Path)
    arguments.add_argument("--note", default="", help="said beside the machine, say what else ran on it")
    given = arguments.parse_args()
    folders = given.only_read or [run(seed, given.runs) for seed in range(given.seeds)]
    write(folders, given.note)


def run(seed: int, runs: Path) -> Path:
    command = [sys.executable, "-m", "forge", "quickstart", "--seed", str(seed), "--runs", str(runs)]
    subprocess.run(command, check=True)
    return (runs / "latest").resolve()


def write(folders: list[Path], note: str) -> None:
    from forge.metrics.intervals import mean_interval, paired_interval
    from forge.report.prediction import compare
    from forge.runs import RunFolder, write_json, write_text

    rows, curves = [], {}
    for path in folders:
        folder = RunFolder.open(path)
        scenario, evals, summary = folder.scenario(), folder.read("evaluation.json"), folder.read("summary.json")
        prediction, meta = folder.read("prediction.json"), folder.read("meta.json")
        assert evals is not None
        assert summary is not None
        assert prediction is not None
        assert meta is not None
        gain = paired_interval(evals["start"]["scores"], evals["end"]["scores"])
        rows.append(
            {
                "seed": scenario.seed,
                "policy": f"W = {scenario.shape().window} of N = {scenario.queue.n}, C = {scenario.queue.concurrency}",
                "tasks": gain.n,
                "start": evals["start"]["mean"],
                "end": evals["end"]["mean"],
                "gain": gain.mean,
                "gain_low": gain.low,
                "gain_high": gain.high,
                "steps": summary["steps"],
                "law_violations": len(summary["law_violations"]),
                "compared": [
                    {"key": c.key, "predicted": c.predicted, "measured": c.measured, "error": c.error}
                    for c in compare(prediction, summary)
                ],
                "rescored": _rescored(folder.read("recalibration.json")),
                "lengths": lengths(folder),
                "machine": meta["machine"],
            }
        )
        curves[scenario.seed] = summary["reward"]["curve"]
    HERE.mkdir(parents=True, exist_ok=True)
    gains = mean_interval([float(r["gain"]) for r in rows])
    write_json(HERE / "results.json", {"rows": rows, "gain_over_seeds": [gains.mean, gains.low, gains.high]})
    write_text(HERE / "results.md", table(rows, note))
    picture(curves)
    print(HERE / "results.md")


def _rescored(recalibration: dict[str, Any] | None) -> list[dict[str, object]]:
    """Calibrated on the first minute, scored on the rest; empty for a run too short for it."""
    from forge.report.prediction import compare

    rows = compare(recalibration, recalibration["measured"]) if recalibration else []
    return [{"key": c.key, "predicted": c.predicted, "measured": c.measured, "error": c.error} for c in rows]


def lengths(folder: Any) -> dict[str, list[float]]:
    """(turns, sampled tokens) of a member: probed, foretold from those of the probe that passed, and measured."""
    from forge import trace as ev
    from forge.runs import RunFolder
    from sim.learnt import imitate, mean_lengths
    from sim.paths import read_paths

    probe = list(RunFolder.open((folder.path / "probe" / "latest").resolve()).events())
    probed, played = read_paths(probe), read_paths(folder.events()).all()
    difficulty = {e.position: e.difficulty for e in probe if isinstance(e, ev.Submitted)}
    foretold = [imitate(name, probed, difficulty) or probed for name in probed.difficulties]
    return {
        "probed": list(mean_lengths(probed.all())),
        "foretold": list(
            mean_lengths([p for n, f in zip(probed.difficulties, foretold, strict=True) for p in f.of(n)])
        ),
        "begun in the first 10 s": list(mean_lengths([p for p in played if p.submitted_s <= FIRST_S])),
        "begun after 60 s": list(mean_lengths([p for p in played if p.submitted_s > LATER_S])),
    }


def table(rows: list[dict[str, Any]], note: str) -> str:
    lines = [
        "# Quickstart over seeds",
        "",
        f"Machine: {rows[0]['machine']}. Made by `python reports/quickstart.py`.{' ' + note if note else ''}",
        "",
        "Held-out tasks, greedy decoding; the interval is the paired 95% bootstrap over tasks.",
        "",
        "| seed | policy | tasks | start | end | gain | 95% interval | steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        interval = f"[{r['gain_low']:.3f}, {r['gain_high']:.3f}]"
        lines.append(
            f"| {r['seed']} | {r['policy']} | {r['tasks']} | {r['start']:.3f} | {r['end']:.3f} | {r['gain']:+.3f} "
            f"| {interval} | {r['steps']} |"
        )
    lines += [
        "",
        "Predicted before the first training step / measured, and the error:",
        "",
        *_side_by_side(rows, "compared"),
    ]
    if all(r["rescored"] for r in rows):
        lines += [
            "",
            "Recalibrated on the first minute / measured on the rest, and the error:",
            "",
            *_side_by_side(rows, "rescored"),
        ]
    lines += [
        "",
        "What a member does, turns / sampled tokens. Items per second hang on it, and it changes as the policy learns;",
        "it is foretold from the members of the probe that passed (`sim/learnt.py`):",
        "",
        *_lengths(rows),
    ]
    return "\n".join(lines) + "\n"


def _lengths(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| members | " + " | ".join(f"seed {r['seed']}" for r in rows) + " |", "|---|" + "---|" * len(rows)]
    for when in rows[0]["lengths"]:
        cells = [f"{r['lengths'][when][0]:.2f} / {r['lengths'][when][1]:.1f}" for r in rows]
        lines.append(f"| {when} | " + " | ".join(cells) + " |")
    return lines


def _side_by_side(rows: list[dict[str, Any]], what: str) -> list[str]:
    lines = ["| figure | " + " | ".join(f"seed {r['seed']}" for r in rows) + " |", "|---|" + "---|" * len(rows)]
    by_seed = [{c["key"]: c for c in r[what]} for r in rows]
    for key in by_seed[0]:
        cells = [f"{c[key]['predicted']:.3g} / {c[key]['measured']:.3g}{_error(key, c[key])}" for c in by_seed]
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return lines


def _error(key: str, row: dict[str, Any]) -> str:
    """Relative; of a share the difference."""
    if row["error"] is None:
        return ""
    return f" ({row['error']:+.2f})" if key.endswith("_fraction") else f" ({row['error']:+.1%})"


def picture(curves: dict[int, list[list[float]]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from forge.metrics.stats import smooth, smoothing_window
    from forge.report.drawing import STYLE

    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.6))
        for seed, curve in sorted(curves.items()):
            rewards = smooth([r for _, _, r in curve], smoothing_window(len(curve)))
            axes.plot([t for t, _, _ in curve], rewards, label=f"seed {seed}")
        axes.set(xlabel="seconds of training", ylabel="mean reward of a step's batch", ylim=(0, 1))
        axes.legend()
        figure.savefig(HERE / "reward.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
