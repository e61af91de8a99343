"""Where speculation pays: steps by batch and context, whole rollouts by policy, beside what others published.

    .venv/bin/python reports/speculation.py [--quick]

Writes reports/speculation/: results.json, results.md, steps.png, rollouts.png. Two minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from forge.cost import CostModel, Deployment, Precision, hardware, model_card
from forge.policies.router import RoundRobin
from forge.policies.speculation import CostAware, Fixed, Off, Speculation
from sim.engine import Instance, Shape
from sim.iteration import RooflineTimes
from sim.serve import Loop, Serving
from sim.sessions import Session, Step
from sim.speculation import Head, SpeculativeTimes

HERE = Path(__file__).parent / "speculation"
FP8 = Precision(dense="fp8", experts="fp8", kv="fp8")
DEPLOYMENTS = {
    "Llama-3.1-8B on an H100": Deployment(model=model_card("llama_3_1_8b"), hardware=hardware("h100_sxm")),
    "Qwen3-32B on 4 H200": Deployment(model=model_card("qwen3_32b"), hardware=hardware("h200_sxm"), tp=4),
    "DeepSeek-V3 (fp8) on 16 H200": Deployment(
        model=model_card("deepseek_v3"), hardware=hardware("h200_sxm"), precision=FP8, tp=16, ep=16
    ),
    "MiniMax-M2.5 (fp8) on 8 H200": Deployment(
        model=model_card("minimax_m2_5"), hardware=hardware("h200_sxm"), precision=FP8, tp=8, ep=8
    ),
}
SKYRL = (0.886, 0.77, 0.663)  # acceptance by depth of SkyRL's MTP head, k = 3
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (256, 1024, 8192, 32768)
POLICIES: dict[str, Speculation] = {"off": Off(), "fixed": Fixed(tokens=3), "cost_aware": CostAware()}
#: of a rollout: answers, their median, sigma of the log, cap (the longest are 16 medians long), prompt tokens
ANSWERS, MEDIAN, SIGMA, CAP, PROMPT = 256, 1000, 0.9, 16_000, 500


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="one deployment and one seed, nothing written")
    quick = arguments.parse_args().quick
    results = measure(dict([next(iter(DEPLOYMENTS.items()))]) if quick else DEPLOYMENTS, seeds=1 if quick else 5)
    if quick:
        print(*lines(results), sep="\n")
        return
    from forge.runs import write_json, write_text

    HERE.mkdir(parents=True, exist_ok=True)
    write_json(HERE / "results.json", results)
    write_text(HERE / "results.md", "\n".join(lines(results)) + "\n")
    plot_steps(results)
    plot_rollouts(results)
    print(HERE / "results.md")


def measure(deployments: dict[str, Deployment], seeds: int) -> dict[str, Any]:
    from rich.progress import track

    steps: dict[str, Any] = {}
    rollouts: dict[str, Any] = {}
    for name, on in track(deployments.items(), "deployments"):
        times = RooflineTimes(CostModel(on))
        steps[name] = {
            str(context): [speed_up(times, SKYRL, rows, context) for rows in ROWS if rows * context <= on.kv_tokens]
            for context in CONTEXTS
        }
        rollouts[name] = {
            label: {str(c): [rollout(times, head, c, seed) for seed in range(seeds)] for c in (4, 16, 64, 256)}
            for label, head in HEADS.items()
        }
    return {"steps": steps, "rollouts": rollouts, "anchors": anchors()}


# --- a step ------


def speed_up(times: RooflineTimes, acceptance: tuple[float, ...], rows: int, context: int) -> float:
    """Tokens a second that drafting to the depth of `acceptance` gives, over none; rows of `context` tokens."""
    drafting = SpeculativeTimes(times, Head(acceptance=acceptance), Fixed(tokens=len(acceptance)))
    a, b, gain = drafting.line(rows)
    one_a, one_b, _ = times.line(rows)
    unit = drafting.unit
    return (gain / unit) * (one_a + one_b * rows * context) / (a + b * rows * context * unit)


def break_even(speed_ups: list[float]) -> str:
    """The batch from which on drafting loses, as text."""
    lost = next((rows for rows, ratio in zip(ROWS, speed_ups, strict=False) if ratio < 1.0), None)
    return "none that fits" if lost is None else str(lost)


def anchors() -> list[dict[str, Any]]:
    """What others measured, and what the model says of the nearest set-up that is told."""
    times = {name: RooflineTimes(CostModel(on)) for name, on in DEPLOYMENTS.items()}
    deepseek, minimax = (times[name] for name in list(DEPLOYMENTS)[2:])
    skyrl = [speed_up(one, SKYRL, 4, 8192) for one in times.values()]
    eagle = {a: [speed_up(minimax, (a,) * 3, rows, 2048) for rows in (1, 32)] for a in (0.4, 0.5, 0.6, 0.7)}
    return [
        {
            "who": "SkyRL, k = 3, acceptance 88.6 / 77.0 / 66.3%",
            "published": "rollout 2.03x",
            "here": f"{min(skyrl):.2f}-{max(skyrl):.2f}x over the four deployments at batch 4",
        },
        {
            "who": "DeepSeek-V3, MTP-1, acceptance 85-90%",
            "published": "1.8x",
            "here": f"{speed_up(deepseek, (0.85,), 8, 4096):.2f}-{speed_up(deepseek, (0.9,), 8, 4096):.2f}x at batch 8",
        },
        {
            "who": "EAGLE-3 on MiniMax-M2.5, acceptance not told",
            "published": "1.55-2.11x at batch 1, parity at 32",
            "here": "; ".join(f"acceptance {a:g}: {one:.2f}x, at 32 {many:.2f}x" for a, (one, many) in eagle.items()),
        },
    ]


# --- a rollout ------

HEADS = {
    "fresh head": Head(acceptance=SKYRL),
    "head left behind": Head(acceptance=tuple(round(a * 0.5, 3) for a in SKYRL)),
}


@dataclass(frozen=True)
class Answers:
    """A trace of single requests that start together: one batch of rollouts."""

    lengths: tuple[int, ...]
    block: int = 16

    def sessions(self) -> Iterator[Session]:
        for i, tokens in enumerate(self.lengths):
            yield Session(name=str(i), start_s=0.0, steps=(Step(prompt=PROMPT, output=tokens),))


def rollout(times: RooflineTimes, head: Head, concurrency: int, seed: int) -> dict[str, float]:
    """Seconds from the first request to the last answer, by policy: the same lengths for all."""
    drawn = np.random.default_rng(seed).normal(size=ANSWERS)
    lengths = np.minimum(np.exp(SIGMA * drawn) * MEDIAN, CAP).astype(int).tolist()
    shape = Shape(block=16, capacity=ANSWERS * (CAP + PROMPT) // 16, budget=8192, seats=concurrency)
    seconds = {}
    for name, policy in POLICIES.items():
        instance = Instance(SpeculativeTimes(times, head, policy), shape)
        serving = Serving(Answers(tuple(lengths)), [instance], RoundRobin(), loop=Loop(concurrency=concurrency))
        seconds[name] = max(row.ended for row in serving.run()) / 1e15
    return seconds


# --- what is written ------


def lines(results: dict[str, Any]) -> list[str]:
    out = [
        "# Where speculation pays",
        "",
        "Made by `python reports/speculation.py`. Cost model with its default efficiencies; a draft step takes 5% of a",
        "decode step. Tokens a second with drafts of depth 3 (SkyRL's acceptance) over none; —: its KV does not fit.",
        "",
        "| deployment | context | " + " | ".join(f"batch {rows}" for rows in ROWS) + " | loses from batch |",
        "|---|---|" + "---|" * (len(ROWS) + 1),
    ]
    for name, contexts in results["steps"].items():
        for context, ratios in contexts.items():
            cells = " | ".join([*(f"{ratio:.2f}" for ratio in ratios), *["—"] * (len(ROWS) - len(ratios))])
            out.append(f"| {name} | {int(context):,} | {cells} | {break_even(ratios)} |")
    out += ["", "![steps](steps.png)", "", "| published by | published | here |", "|---|---|---|"]
    out += [f"| {one['who']} | {one['published']} | {one['here']} |" for one in results["anchors"]]
    out += [
        "",
        "## Rollouts",
        "",
        f"One instance, {ANSWERS} answers, log-normal with median {MEDIAN:,} tokens, sigma {SIGMA}, capped at {CAP:,};",
        "so many at once; speed over `off` on the same lengths, mean over seeds (range).",
        "",
        "| deployment | head | at once | fixed, 3 | cost_aware |",
        "|---|---|---|---|---|",
    ]
    for name, heads in results["rollouts"].items():
        for head, by_concurrency in heads.items():
            for concurrency, runs in by_concurrency.items():
                cells = [ratio_text([run["off"] / run[policy] for run in runs]) for policy in ("fixed", "cost_aware")]
                out.append(f"| {name} | {head} | {concurrency} | {cells[0]} | {cells[1]} |")
    return [*out, "", "![rollouts](rollouts.png)", ""]


def ratio_text(ratios: list[float]) -> str:
    return f"{fmean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def plot_steps(results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    for axes, (name, contexts) in zip(figure.subplots(2, 2, sharex=True).flat, results["steps"].items(), strict=True):
        for context, ratios in contexts.items():
            axes.plot(ROWS[: len(ratios)], ratios, marker="o", markersize=3, label=f"{int(context):,} tokens")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=name, xscale="log", xlabel="requests in the batch", ylabel="speed over no drafts")
    axes.legend(title="context of each")
    figure.savefig(HERE / "steps.png", dpi=110)


def plot_rollouts(results: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    for axes, (name, heads) in zip(figure.subplots(2, 2).flat, results["rollouts"].items(), strict=True):
        for head, by_concurrency in heads.items():
            for policy, style in (("fixed", "--"), ("cost_aware", "-")):
                means = [fmean(run["off"] / run[policy] for run in runs) for runs in by_concurrency.values()]
                color = "tab:blue" if head == "fresh head" else "tab:red"
                axes.plot([int(c) for c in by_concurrency], means, style, color=color, label=f"{policy}, {head}")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set(title=name, xscale="log", xlabel="answers at once", ylabel="rollout speed over off")
    axes.legend()
    figure.savefig(HERE / "rollouts.png", dpi=110)


if __name__ == "__main__":
    main()
