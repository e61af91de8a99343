"""What does the gateway add to a streamed token's way, and how much less is that than LiteLLM's proxy adds?

    .venv/bin/python reports/gateway.py --litellm PYTHON     measure (minutes, on a quiet machine), and write
    .venv/bin/python reports/gateway.py                      write again from results.json

PYTHON is that of an environment with litellm[proxy]==1.108.7. Writes reports/gateway/: results.json (what
`forge bench gateway --json` prints), results.md and added.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pictures import palette, save

HERE = Path(__file__).parent / "gateway"
#: figure, what it is, what it must be
ROWS = (
    ("saturation_chunks_per_s", "saturation, chunks a second", None),
    ("cpu_us_per_chunk", "CPU of the gateway for a chunk, microseconds", None),
    ("added_p50_ms", "added to a chunk at half of saturation, p50, ms", 1.0),
    ("added_p99_ms", "the same, p99, ms", 5.0),
    ("added_first_p50_ms", "added to the first chunk, p50, ms", 1.0),
    ("added_first_p99_ms", "the same, p99, ms", 5.0),
    ("litellm_saturation_chunks_per_s", "LiteLLM's saturation, chunks a second", None),
    ("litellm_cpu_us_per_chunk", "CPU of LiteLLM for a chunk, microseconds", None),
    ("litellm_added_p50_ms", "LiteLLM adds to a chunk at half of its own saturation, p50, ms", None),
    ("litellm_added_p99_ms", "the same, p99, ms", None),
    ("added_at_litellm_rate_p50_ms", "the gateway adds at that rate, p50, ms", None),
    ("errors", "errors, among them those of 1,000 sessions at once", 0.0),
    ("sessions_growth_mib", "growth of its memory over the last two of four rounds of 1,000 sessions, MiB", None),
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--litellm", type=Path)
    given = arguments.parse_args()
    HERE.mkdir(exist_ok=True)
    kept = HERE / "results.json"
    if given.litellm:
        measure(given.litellm, kept)
    result = json.loads(kept.read_text(encoding="utf-8"))
    (HERE / "results.md").write_text("\n".join(lines(result)) + "\n", encoding="utf-8")
    plot(result["figures"])
    print(HERE / "results.md")


def measure(litellm: Path, kept: Path) -> None:
    from forge.bench import gateway
    from forge.doctor import machine
    from forge.runs import write_json

    write_json(kept, {"bench": "gateway", "machine": machine(), **gateway.run(litellm, print)})


def lines(result: dict[str, Any]) -> list[str]:
    figures = result["figures"]
    ratio = figures["ratio_vs_litellm"]
    resident = ", ".join(f"{one:.0f}" for one in result["sessions_rss_mib"])
    load = result["load_average"][1]
    quiet = "The machine was quiet otherwise" if load < 2.5 else "The machine was NOT quiet: others worked on it too"
    return [
        "# What the gateway adds to a streamed token's way",
        "",
        f"{result['machine']['processor']}. {result['protocol']}.",
        f"{quiet} (load average over five minutes at the end: {load:.1f}, the bench's own included).",
        "",
        "| figure | measured | asked |",
        "|---|---|---|",
        *(row(figures[name], what, limit) for name, what, limit in ROWS),
        f"| LiteLLM's p50 over the gateway's, both at that rate | {'-' if ratio is None else f'{ratio:.1f}'} | >= 5 |",
        "",
        f"MiB resident after each round of 1,000 sessions: {resident}.",
        "",
        "![added](added.png)",
        "",
        "Made by `python reports/gateway.py --litellm PYTHON`.",
    ]


def row(value: float | None, what: str, limit: float | None) -> str:
    asked = "" if limit is None else f"<= {limit:g}"
    return f"| {what} | {'-' if value is None else f'{value:,.2f}'} | {asked} |"


def plot(figures: dict[str, float | None]) -> None:
    plt, blue, orange, _ = palette()
    figure, axes = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    bars = [
        ("gateway, first chunk", "added_first_p50_ms", "added_first_p99_ms", blue),
        ("gateway, chunk", "added_p50_ms", "added_p99_ms", blue),
        ("LiteLLM, chunk", "litellm_added_p50_ms", "litellm_added_p99_ms", orange),
    ]
    for at, (_, p50, p99, colour) in enumerate(bars):
        axes.barh(at + 0.2, figures[p50] or 0.0, 0.4, color=colour)
        axes.barh(at - 0.2, figures[p99] or 0.0, 0.4, color=colour, alpha=0.5)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xlabel("milliseconds added at half of saturation: median, and 99th percentile (pale)")
    save(figure, HERE / "added.png")


if __name__ == "__main__":
    main()
