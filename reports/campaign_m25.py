"""What the campaign's day hangs on: fleet, router, KV retention and publication, each varied alone.

    .venv/bin/python reports/campaign_m25.py [--items 6000] [--quick]
    .venv/bin/python reports/campaign_m25.py --day
    .venv/bin/python reports/campaign_m25.py --pages-only

Every variant runs the first items of `scenarios/campaign_m25.toml` and is judged on the time after the first quarter of
an hour, while items are still submitted: beside the scenario as it is, not by itself. `--day` runs all 125,000 items of
the scenario as it is, an hour. Writes reports/campaign_m25/: results.json (or day.json) and results.md, variants.png.
Twenty minutes on two cores, compiled.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "campaign_m25"
NAME = "campaign_m25"
BEGIN_S = 900.0
NEEDED = 125_000 / 86_400  # items/s of a day
VARIANTS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "kv: comes_back": ("policy.kv.kind=comes_back",),
    "router: least_loaded": ("policy.router.kind=least_loaded",),
    "router: seconds": ("policy.router.kind=seconds",),
    "112 instances": ("engine.instances=112",),
    "144 instances": ("engine.instances=144",),
    "C = 2,560": ("queue.concurrency=2560",),
    "C = 3,584": ("queue.concurrency=3584",),
    "publish by abort": ("policy.sync.mode=abort",),
}
SHOWN = {
    "items_per_s": "items/s",
    "gain": "against as it is",
    "cached_share": "prompt found cached",
    "engine_idle_fraction": "rollout idle",
    "trainer_idle_fraction": "trainer idle",
    "ttft_p90_s": "TTFT p90, s",
    "tpot_p50_s": "TPOT p50, s",
    "lag_steps_max": "lag, steps",
    "timeouts": "timed out",
}


def main() -> None:
    from forge.runs import read_json, write_json, write_text

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--items", type=int, default=6000)
    arguments.add_argument("--quick", action="store_true", help="two variants of 64 items, nothing written")
    arguments.add_argument("--day", action="store_true", help="the whole day, as it is")
    arguments.add_argument("--pages-only", action="store_true", help="from the results that are there")
    given = arguments.parse_args()
    if given.quick:
        print(*table(with_gain(measure(dict(list(VARIANTS.items())[:2]), 64))), sep="\n")
        return
    HERE.mkdir(parents=True, exist_ok=True)
    if given.pages_only:
        pass
    elif given.day:
        write_json(HERE / "day.json", run((), None))
    else:
        write_json(HERE / "results.json", {"items": given.items, "variants": measure(VARIANTS, given.items)})
    results, day = read_json(HERE / "results.json"), read_json(HERE / "day.json")
    write_text(HERE / "results.md", "\n".join(lines(results, day)) + "\n")
    if results is not None:
        plot(results["variants"])
    print(HERE / "results.md")


def measure(variants: dict[str, tuple[str, ...]], items: int) -> dict[str, Any]:
    from rich.progress import track

    with ProcessPoolExecutor(max_workers=2) as pool:
        runs = pool.map(run, variants.values(), [items] * len(variants))
        return dict(track(zip(variants, runs, strict=True), "variants", len(variants)))


def run(settings: tuple[str, ...], items: int | None) -> dict[str, Any]:
    """The figures of one variant. `items` None: all."""
    from forge import scenario as scenarios
    from sim.streaming import stream

    cut = () if items is None else (f"stop.items={items}",)
    done = stream(scenarios.load(NAME, [*settings, *cut]))
    summary, last = done.summary(), max(item.submitted_s for item in done.run.items.values())
    begin, end = (BEGIN_S, last) if last > 2 * BEGIN_S else (0.0, summary["wall_s"])
    trained = sum(len(step.positions) for step in done.run.steps if begin < step.committed_s <= end)
    return {
        "items_per_s": trained / (end - begin),
        "cached_share": summary["cached_share"],
        "engine_idle_fraction": summary["engine_idle_fraction"],
        "trainer_idle_fraction": summary["trainer_idle_fraction"],
        "ttft_p90_s": summary["ttft_s"]["p90"],
        "tpot_p50_s": summary["tpot_s"]["p50"],
        "lag_steps_max": summary["lag_steps_max"],
        "timeouts": summary["dead"]["timeout"],
        "hours": summary["wall_s"] / 3600,
        "calls": done.calls,
        "cpu_s": done.cpu_s,
        "law_violations": len(summary["law_violations"]),
    }


# --- what is written ------


def lines(results: dict[str, Any] | None, day: dict[str, Any] | None) -> list[str]:
    out = [
        "# The campaign: a day of a million samples",
        "",
        "Made by `python reports/campaign_m25.py`; the scenario and its reasons are in `scenarios/campaign_m25.toml`.",
        f"A day's million samples in items of 8 are {NEEDED:.2f} items a second.",
        "",
    ]
    if day is not None:
        out += [
            "## The day as it is",
            "",
            f"{day['calls']:,} calls in {day['hours']:.1f} h, with the end of the last items; simulated in "
            f"{day['cpu_s'] / 60:.0f} min of CPU time ({day['calls'] / day['cpu_s']:,.0f} calls/s).",
            "",
            *table(with_gain({"all 125,000 items": day})),
            "",
        ]
    if results is not None:
        out += [
            f"## One thing changed, first {results['items']:,} items",
            "",
            "Items/s of the time after the first quarter of an hour while items are submitted; all else of the whole",
            "run. In that time the run still fills up (an item takes half an hour and more, and 3,072 begin at once),",
            "so levels are about half of a day's, which are in the scenario's comment: read what differs.",
            "",
            *table(with_gain(results["variants"])),
            "",
            "![variants](variants.png)",
            "",
        ]
    return out


def with_gain(runs: dict[str, Any]) -> dict[str, Any]:
    """Items/s relative to the first one's."""
    base = next(iter(runs.values()))["items_per_s"]
    return {name: one | {"gain": one["items_per_s"] / base - 1} for name, one in runs.items()}


def table(runs: dict[str, Any]) -> list[str]:
    head = ["| | " + " | ".join(SHOWN.values()) + " |", "|---|" + "---|" * len(SHOWN)]
    return head + [
        f"| {name} | " + " | ".join(shown(key, one[key]) for key in SHOWN) + " |" for name, one in runs.items()
    ]


def shown(key: str, value: float) -> str:
    return f"{value:+.0%}" if key == "gain" else f"{value:.3g}"


def plot(variants: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    names = list(reversed(variants))
    gains = with_gain(variants)
    axes.barh(names, [100 * gains[name]["gain"] for name in names])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="items trained on a second, % against as it is", title="campaign_m25, one thing changed")
    figure.savefig(HERE / "variants.png", dpi=110)


if __name__ == "__main__":
    main()
