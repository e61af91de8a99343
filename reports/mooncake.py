"""The simulator against Mooncake's published figures: hit rate by cache size, mean TTFT by routing policy.

    .venv/bin/python reports/mooncake.py [--trace FILE] [--seeds 3] [--plots-only]

The trace is `conversation_trace.jsonl` of Mooncake's FAST '25 release. One parameter, the speed at which it is
replayed, is chosen to bring the four published TTFTs closest; everything else is as published or a default, and varied
one at a time around that. Writes reports/mooncake/: results.json, results.md, hit_rate.png, ttft.png, speed.png. About
fifteen minutes on one core.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mooncake_pages import HERE, write_all

TRACE = Path(__file__).parents[2] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl"
SIZES = (1e5, 3e5, 1e6, 2e6, 3e6, 5e6, 1e7, 2e7, 3e7, 5e7, 1e8)
SPEEDS = (0.85, 0.9, 0.925, 0.95, 0.975, 1.0, 1.05, 1.1)
SPREAD_SPEEDS = (0.95, 1.0, 1.05)
#: One at a time around the chosen speed. What only kv_centric knows is varied for it alone.
VARIED: dict[str, tuple[Any, ...]] = {
    "cache_tokens": (5e5, 1.5e6, 6e6),
    "instances": (7, 9),
    "slowness": (0.9, 1.1),
    "budget": (2048, 32768),
    "period_s": (10.0,),
    "threshold": (8.0,),
    "bandwidth": (6e9,),
}
ONLY_KV_CENTRIC = ("threshold", "bandwidth")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--trace", type=Path, default=TRACE)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--plots-only", action="store_true", help="from results.json")
    given = arguments.parse_args()
    from forge.runs import read_json, write_json

    HERE.mkdir(exist_ok=True)
    if not given.plots_only:
        write_json(HERE / "results.json", measure(given.trace, given.seeds))
    results = read_json(HERE / "results.json")
    assert results is not None, "no results.json: run without --plots-only first"
    write_all(results)


def measure(path: Path, seeds: int) -> dict[str, Any]:
    from rich.console import Console

    from forge.doctor import machine
    from sim import mooncake as m
    from sim.traces.mooncake import load

    trace, console = load(path), Console()
    endless = m.hit_rate(trace, None)
    hits = [{"tokens": tokens, "hit": m.hit_rate(trace, tokens)} for tokens in SIZES]

    def ttft(speed: float, policies: tuple[str, ...] = m.POLICIES, **changed: Any) -> dict[str, Any]:
        setup = m.Setup(speed=speed, **changed)
        found = {policy: asdict(m.over_seeds(trace, setup, policy, range(seeds))) for policy in policies}
        told = ", ".join(f"{policy} {outcome['ttft_s']:.2f}" for policy, outcome in found.items())
        console.print(f"speed {speed}, {changed}: {told}", highlight=False)
        return found

    speeds = {speed: ttft(speed) for speed in SPEEDS}
    by_speed = {speed: {p: o["ttft_s"] for p, o in found.items()} for speed, found in speeds.items()}
    chosen = m.closest(by_speed)
    spread = {speed: ttft(speed, spread=True) for speed in SPREAD_SPEEDS}
    varied = [
        {
            "parameter": name,
            "value": value,
            "outcomes": ttft(chosen, ("kv_centric",) if name in ONLY_KV_CENTRIC else m.POLICIES, **{name: value}),
        }
        for name, values in VARIED.items()
        for value in values
    ]
    ten = ttft(chosen, ("random", "cache_aware", "kv_centric"), instances=10)
    nothing = ttft(chosen, ("least_loaded",), cached=False)["least_loaded"]
    return {
        "machine": machine(),
        "seeds": seeds,
        "requests": sum(1 for _ in trace.sessions()),
        "setup": asdict(m.Setup(speed=chosen)),
        "token_s": m.Setup().token_s(trace),
        "endless_hit": endless,
        "hits": hits,
        "published_hit_share": {f"{k:.0f}": v for k, v in m.PUBLISHED_HIT_SHARE.items()},
        "dram_share": {n: m.hit_rate(trace, size / 327680) / endless for n, size in (("TB", 1e12), ("TiB", 2.0**40))},
        "published_ttft_s": m.PUBLISHED_TTFT_S,
        "speeds": [judged(speed, outcomes) for speed, outcomes in speeds.items()],
        "spread": [judged(speed, outcomes) for speed, outcomes in spread.items()],
        "chosen": chosen,
        "varied": varied,
        "others": {
            "gpu_time_saved": 1 - speeds[chosen]["kv_centric"]["gpu_s"] / nothing["gpu_s"],
            "global_over_local_hit": ten["kv_centric"]["hit"] / ten["cache_aware"]["hit"],
            "global_over_local_gpu": ten["kv_centric"]["gpu_s"] / ten["cache_aware"]["gpu_s"],
            "global_over_random_hit": ten["kv_centric"]["hit"] / ten["random"]["hit"],
            "global_over_random_gpu": ten["kv_centric"]["gpu_s"] / ten["random"]["gpu_s"],
        },
    }


def judged(speed: float, outcomes: dict[str, Any]) -> dict[str, Any]:
    from sim import mooncake as m

    ttft_s = {policy: outcome["ttft_s"] for policy, outcome in outcomes.items()}
    return {"speed": speed, "within": m.within(ttft_s), "errors": m.errors(ttft_s), "outcomes": outcomes}


if __name__ == "__main__":
    main()
