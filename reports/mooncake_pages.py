"""The pages and pictures of `reports/mooncake.py`: results.md and three PNGs from what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pictures import palette, save

HERE = Path(__file__).parent / "mooncake"
NAMES = {
    "random": "random",
    "least_loaded": "load balancing",
    "cache_aware": "local cache-aware",
    "kv_centric": "global cache-aware",
}
#: Other figures of the publication, none of them used to choose anything: (value, where it stands).
OTHERS = {
    "gpu_time_saved": (0.36, "prefill GPU time saved against vLLM without prefix cache (figure 8)"),
    "global_over_local_hit": (2.22, "hit rate, global over local cache, 10 prefill nodes (figure 10)"),
    "global_over_local_gpu": (0.76, "prefill GPU time, global over local cache, 10 prefill nodes (figure 10)"),
}
OPEN = """Read in summaries of the FAST '25 paper and of arXiv 2407.00079 v4; the paper's own text was not at hand.

Told: 16 nodes of 8 A800 (80 GB, 4x200 Gbps), each a prefill or a decode instance; dummy weights of the shape of
Llama-3-70B; the conversation trace (12,031 requests in an hour, 12,035 prompt tokens on average) by its timestamps;
about 1 TB of DRAM a node for KV, "3M tokens" at 320 KB each; LRU; transfers at 87 GB/s; 8 + 8 nodes as the best split
for another workload, and as the split of the technical report's own run of this experiment.

Open: the split in this experiment; whether arrivals are sped up; how fast a node computes a prompt, hence the load; the
chunk of prefill, and whether nodes form pipelines; `kvcache_balancing_threshold`; how old the scheduler's view is; what
a TTFT holds beyond queue, fetch and prefill (HTTP, loading a prefix from DRAM, hand-over to the decode instance);
whether KV written in decoding is kept for the next turn; how figure 10's 'local' side routes; repetitions and spread.
Whether its replay kept the trace's bursts of ten requests every three seconds (they matter: see above). Blocks of its
store have 256 tokens, those of the published trace 512. Rejection (TTFT above 30 s) is not said to be on
in this experiment; here nobody is rejected. The technical report's first version of the experiment has other values
(92.07, 60.41, 14.36, 6.26 s) on another trace."""


def write_all(results: dict[str, Any]) -> None:
    """`results` as `mooncake.measure` returns it, read back from JSON."""
    plot_hits(results)
    plot_ttft(results)
    plot_speed(results)
    write(results)


# --- what is written ------


def write(results: dict[str, Any]) -> None:
    from forge.runs import write_text

    lines = [
        "# Mooncake's published figures, simulated",
        "",
        f"Conversation trace of the FAST '25 release, {results['requests']:,} requests. Made by",
        "`python reports/mooncake.py`, which says what every symbol is; `sim/mooncake.py` is the set-up.",
        "",
        *hit_lines(results),
        *ttft_lines(results),
        *speed_lines(results),
        *varied_lines(results),
        *other_lines(results),
        "## The published set-up",
        "",
        OPEN,
    ]
    write_text(HERE / "results.md", "\n".join(lines) + "\n")


def hit_lines(results: dict[str, Any]) -> list[str]:
    endless = results["endless_hit"]
    three = next(row["hit"] for row in results["hits"] if row["tokens"] == 3e6) / endless
    published = results["published_hit_share"]["3000000"]
    dram = results["dram_share"]
    return [
        "## Hit rate of one LRU cache",
        "",
        f"Prompt tokens found, blocks of 512. An endless cache: {endless:.1%} (published: 40% is reusable).",
        f"3 million tokens reach {three:.3f} of it; published: {published:.2f} (error {three / published - 1:+.0%}).",
        f"The publication rounds: 1 TB of DRAM at 320 KiB a token reaches {dram['TB']:.3f}, 1 TiB {dram['TiB']:.3f}.",
        "",
        "| tokens | hit rate | of endless |",
        "|---|---|---|",
        *(f"| {r['tokens'] / 1e6:g}M | {r['hit']:.3f} | {r['hit'] / endless:.3f} |" for r in results["hits"]),
        f"| endless | {endless:.3f} | 1 |",
        "",
        "![hit rate](hit_rate.png)",
        "",
    ]


def ttft_lines(results: dict[str, Any]) -> list[str]:
    at = next(row for row in results["speeds"] if row["speed"] == results["chosen"])
    setup = results["setup"]
    return [
        "## Mean TTFT by policy",
        "",
        f"{setup['instances']} prefill instances of 8 A800 (tensor parallel), {setup['cache_tokens'] / 1e6:g}M tokens",
        f"of KV each, arrivals at {setup['speed']:g} of their recorded speed: the one parameter chosen by these",
        f"figures, the same for all four. {results['token_s'] * 1e6:.0f} us a prompt token on average (roofline with",
        "the default efficiencies, not fitted to this machine). Mean over seeds, and range of the seeds' means.",
        "",
        "| policy | published s | simulated s | error | range | p50 | p90 | hit rate | fetched | busy |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {NAMES[p]} (`{p}`) | {results['published_ttft_s'][p]:.2f} | {o['ttft_s']:.2f} | {at['errors'][p]:+.0%} "
            f"| {o['low_s']:.2f}-{o['high_s']:.2f} | {o['p50_s']:.2f} | {o['p90_s']:.2f} | {o['hit']:.1%} "
            f"| {o['fetched']:.1%} | {o['busy']:.0%} |"
            for p, o in at["outcomes"].items()
        ),
        "",
        "Goal: each within 25%. " + ("Reached." if at["within"] else "Not reached by all four."),
        "",
        "![TTFT](ttft.png)",
        "",
    ]


def speed_lines(results: dict[str, Any]) -> list[str]:
    def row_of(row: dict[str, Any]) -> str:
        cells = (f"{o['ttft_s']:.2f} ({row['errors'][p]:+.0%})" for p, o in row["outcomes"].items())
        return f"| {row['speed']:g} | {' | '.join(cells)} | {'yes' if row['within'] else 'no'} |"

    head = ["| speed | " + " | ".join(NAMES[p] for p in results["published_ttft_s"]) + " | all within 25% |"]
    head.append("|---" * 6 + "|")
    return [
        "## How much hangs on the speed of arrivals",
        "",
        "1 is the recorded speed. A pool that computes faster by a factor at speed 1 is the same run with all times",
        "divided by it, so this is also the sensitivity to how fast a node is.",
        "",
        *head,
        *map(row_of, results["speeds"]),
        "",
        "![speed](speed.png)",
        "",
        "Published timestamps are three seconds apart, about ten requests at each; the figures above replay them so.",
        "With the same requests spread evenly over the three seconds:",
        "",
        *head,
        *map(row_of, results["spread"]),
        "",
    ]


def varied_lines(results: dict[str, Any]) -> list[str]:
    from sim.mooncake import POLICIES

    def cells(outcomes: dict[str, Any]) -> str:
        return " | ".join(f"{outcomes[p]['ttft_s']:.2f}" if p in outcomes else "" for p in POLICIES)

    at = next(row for row in results["speeds"] if row["speed"] == results["chosen"])
    return [
        "## One at a time around it",
        "",
        "Mean TTFT in seconds. `threshold` and `bandwidth` (bytes/s) are of global cache-aware alone; `period_s`: how",
        "often the scheduler hears of caches; `slowness`: factor on compute.",
        "",
        "| changed | " + " | ".join(NAMES[p] for p in POLICIES) + " |",
        "|---" * 5 + "|",
        f"| nothing | {cells(at['outcomes'])} |",
        *(f"| {row['parameter']} = {row['value']:g} | {cells(row['outcomes'])} |" for row in results["varied"]),
        "",
    ]


def other_lines(results: dict[str, Any]) -> list[str]:
    found = results["others"]
    return [
        "## Other published figures, not used above",
        "",
        "| figure | published | simulated |",
        "|---|---|---|",
        *(f"| {text} | {value:.2f} | {found[name]:.2f} |" for name, (value, text) in OTHERS.items()),
        "",
        f"Against random routing instead of local cache-aware: hit rate {found['global_over_random_hit']:.2f} times,",
        f"GPU time {found['global_over_random_gpu']:.2f}. How requests were routed on the local side is not published.",
        "",
    ]


# --- plots ------


def plot_hits(results: dict[str, Any]) -> None:
    plt, blue, orange, _ = palette()
    endless = results["endless_hit"]
    figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
    ax.plot([r["tokens"] for r in results["hits"]], [r["hit"] / endless for r in results["hits"]], "o-", color=blue)
    for tokens, share in results["published_hit_share"].items():
        ax.plot(float(tokens), share, "D", color=orange, label=f"published: {share:.2f} at 3M tokens")
    ax.set(
        xscale="log", xlabel="cache (tokens)", ylabel=f"hit rate, of an endless cache's {endless:.1%}", ylim=(0, 1.05)
    )
    ax.legend()
    save(figure, HERE / "hit_rate.png")


def plot_ttft(results: dict[str, Any]) -> None:
    plt, blue, orange, _ = palette()
    at = next(row for row in results["speeds"] if row["speed"] == results["chosen"])["outcomes"]
    policies = list(NAMES)
    figure, ax = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
    published = [results["published_ttft_s"][p] for p in policies]
    ours = [at[p]["ttft_s"] for p in policies]
    spread = [
        [at[p]["ttft_s"] - at[p]["low_s"] for p in policies],
        [at[p]["high_s"] - at[p]["ttft_s"] for p in policies],
    ]
    for offset, values, colour, label in ((-0.2, published, orange, "published"), (0.2, ours, blue, "simulated")):
        bars = ax.bar([i + offset for i in range(len(policies))], values, 0.38, color=colour, label=label)
        ax.bar_label(bars, fmt="%.2f", fontsize=8, padding=3)
    ax.errorbar([i + 0.2 for i in range(len(policies))], ours, yerr=spread, fmt="none", color="0.3", capsize=3)
    ax.set(yscale="log", ylim=(1, 40), ylabel="mean TTFT (s)")
    ax.set_xticks(range(len(policies)), [NAMES[p] for p in policies])
    ax.legend()
    save(figure, HERE / "ttft.png")


def plot_speed(results: dict[str, Any]) -> None:
    plt, *colours = palette()
    figure, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
    speeds = [row["speed"] for row in results["speeds"]]
    for (policy, published), colour in zip(results["published_ttft_s"].items(), [*colours, "#8A5FBF"], strict=True):
        ax.axhspan(published * 0.75, published * 1.25, color=colour, alpha=0.12, linewidth=0)
        ttft = [row["outcomes"][policy]["ttft_s"] for row in results["speeds"]]
        ax.plot(speeds, ttft, "o-", color=colour, label=NAMES[policy])
        even = [row["outcomes"][policy]["ttft_s"] for row in results["spread"]]
        ax.plot([row["speed"] for row in results["spread"]], even, "--", color=colour, linewidth=0.9)
    ax.plot([], [], "--", color="0.4", linewidth=0.9, label="arrivals spread over 3 s")
    ax.axvline(results["chosen"], color="0.5", linestyle=":", label="chosen")
    ax.set(yscale="log", xlabel="speed of arrivals, of the recorded", ylabel="mean TTFT (s); bands: published, 25%")
    ax.legend()
    save(figure, HERE / "speed.png")
