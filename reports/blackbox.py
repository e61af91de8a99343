"""Agent programs of others against the gateway: `forge bench blackbox`, as a table.

    .venv/bin/python reports/blackbox.py [--only NAME ...] [--pages-only]

Writes reports/blackbox/: results.json (what the bench prints), results.md. First `forge blackbox install`. With --only
those cases are run again, and the other rows stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "blackbox"
FAULTS = ("429", "500", "cut", "stall")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", default=[], help="cases of forge/bench/blackbox.toml")
    arguments.add_argument("--pages-only", action="store_true", help="from results.json")
    given = arguments.parse_args()
    from forge.bench.blackbox_cases import load_cases
    from forge.runs import read_json, write_json, write_text

    HERE.mkdir(exist_ok=True)

    if not given.pages_only:
        for name in load_cases(given.only):
            now = measure(name)
            write_json(HERE / "results.json", joined(read_json(HERE / "results.json"), now))
    results = read_json(HERE / "results.json")
    assert results is not None, "no results.json: run without --pages-only first"
    write_text(HERE / "results.md", "\n".join(page(judged(results))) + "\n")


def measure(name: str) -> dict[str, Any]:
    from forge.bench.blackbox import run
    from forge.doctor import machine

    measured = run([name], [], lambda said: print(said, flush=True))
    for row in measured["rows"]:
        del row["output"]  # long, and full of the machine's paths
    return {"machine": machine(), **measured}


def joined(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The rows of before, those run again replaced; so a report that is broken off goes on."""
    if before is None:
        return now
    again = {row["program"] for row in now["rows"]} | {name.partition(",")[0] for name in now["left_out"]}
    rows = [row for row in before["rows"] if row["program"] not in again] + now["rows"]
    out = {name: why for name, why in before["left_out"].items() if name.partition(",")[0] not in again}
    return {**now, "rows": rows, "left_out": {**out, **now["left_out"]}}


def judged(results: dict[str, Any]) -> dict[str, Any]:
    """Rows in the order of blackbox.toml, and by what it expects now; counts of all."""
    from forge.bench.blackbox import counted
    from forge.bench.blackbox_cases import load_cases

    cases, rows = load_cases(), []
    left_out = {f"{name}, {variant}": why for name, case in cases.items() for variant, why in case.left_out.items()}
    for name, case in cases.items():
        for row in (one for one in results["rows"] if one["program"] == name):
            expected, gives_up = case.expected(row["variant"]), case.gives_up.get(row["variant"], "")
            fits = row["finished"] == (not gives_up) and row["shape"] in expected
            rows.append({**row, "expected": expected, "gives_up": gives_up, "as_expected": fits})
    return {**results, "rows": rows, "left_out": left_out, "figures": counted(rows)}


def page(results: dict[str, Any]) -> list[str]:
    figures, programs = results["figures"], list(dict.fromkeys(row["program"] for row in results["rows"]))
    rows = {(row["program"], row["variant"]): row for row in results["rows"]}
    lines = [
        "# Agent programs of others against the gateway",
        "",
        f"{len(programs)} recipes, {figures['runs']} runs: {figures['finished']} finished their task by the verifier's "
        f"word, {figures['gave_up_as_they_do']} gave up where their program always does; {figures['as_expected']} did, "
        "tree included, what `forge/bench/blackbox.toml` expects. Unmodified programs, each run in a sandbox with a "
        "fresh home and no network but its own trajectory; the real gateway; a scripted policy. A cell: requests, and "
        "the tree. `root 2` is one conversation of two completions; what forks off it stands in parentheses, with the "
        "gateway's reason.",
        "",
        "| program | API | stream | first prompt, bytes | in peace | seconds | echoes |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_plain(name, rows) for name in programs]
    lines += ["", "| program | " + " | ".join(_TITLES[one] for one in FAULTS) + " |", "|---" * 5 + "|"]
    lines += [f"| {name} | " + " | ".join(_cell(rows.get((name, one))) for one in FAULTS) + " |" for name in programs]
    lines += ["", "| program | compaction | sub-agent |", "|---|---|---|"]
    special = [name for name in programs if {(name, "compaction"), (name, "sub_agent")} & set(rows)]
    lines += [
        f"| {name} | {_cell(rows.get((name, 'compaction')))} | {_cell(rows.get((name, 'sub_agent')))} |"
        for name in special
    ]
    if missing := {what: why for what, why in results["left_out"].items() if why != "no case"}:
        lines += ["", "Left out:", "", *(f"- {what}: {why}" for what, why in missing.items())]
    unlike = [row for row in results["rows"] if not row["as_expected"]]
    if unlike:
        lines += ["", "Not as expected:", ""]
        for row in unlike:
            expected = " or ".join(row["expected"])
            lines.append(f"- {row['program']}, {row['variant']}: {row['outcome']}; {row['shape']}, not {expected}")
    return lines


_TITLES = {"429": "429, Retry-After 1", "500": "500", "cut": "cut mid-answer", "stall": "no answer for 6 s"}


def _plain(name: str, rows: dict[tuple[str, str], Any]) -> str:
    row = rows.get((name, "plain"))
    if row is None:
        return f"| {name} | - | - | - | - | - | - |"
    echoes = ", ".join(f"{kind} {count}" for kind, count in row["echoes"].items())
    streamed, first = "yes" if row["streamed"] else "no", row["prompts"][0]
    known = f"{name} {row['version']} | {row['protocol']} | {streamed} | {first:,}"
    return f"| {known} | {_cell(row)} | {row['seconds']:.0f} | {echoes} |"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    mark = "" if row["finished"] else "gives up: " if row["gives_up"] else "**not finished**: "
    return f"{mark}{row['requests']}; {row['shape'] or 'no completion'}"


if __name__ == "__main__":
    main()
