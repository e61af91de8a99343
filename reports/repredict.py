"""What today's simulator says of quickstarts run before: predicted from each one's probe, and from its first minute.

    .venv/bin/python reports/repredict.py RUN...

Nothing is run live, so a change of the simulator shows at once, on runs it was not made from and under the same load of
the machine as theirs. Writes reports/quickstart/repredicted.json and repredicted.md.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "quickstart"
SEEDS = range(5)
SHOWN = (
    "throughput_tokens_per_s",
    "trained_tokens_per_s",
    "items_per_s",
    "lag_items_mean",
    "engine_idle_fraction",
    "trainer_idle_fraction",
    "nonstationarity",
)


def main() -> None:
    from forge.runs import write_json, write_text

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("runs", nargs="+", type=Path)
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(repredict, arguments.parse_args().runs))
    HERE.mkdir(parents=True, exist_ok=True)
    write_json(HERE / "repredicted.json", {"rows": rows})
    write_text(HERE / "repredicted.md", table(rows))
    print(HERE / "repredicted.md")


def repredict(path: Path) -> dict[str, Any]:
    """One run's figures, {key: [predicted, measured, error]}: of the whole from its probe, of the rest from its first
    minute."""
    from forge.runs import RunFolder
    from sim.calibrate import calibrate
    from sim.learnt import as_learnt
    from sim.predict import predict
    from sim.recalibrate import recalibrate

    folder = RunFolder.open(path)
    probe = RunFolder.open((folder.path / "probe" / "latest").resolve())
    scenario, events, seen = folder.scenario(), list(folder.events()), list(probe.events())
    fitted = as_learnt(calibrate(seen, probe.scenario(), source="its probe"), seen, scenario)
    said = predict(scenario.model_copy(update={"sim": fitted.sim}), SEEDS)
    again = recalibrate(events, scenario, seeds=SEEDS)
    return {
        "run": folder.path.name,
        "seed": scenario.seed,
        "probe": _figures(said, folder.read("summary.json")),
        "first minute": _figures(again, again["measured"]) if again else {},
    }


def _figures(said: dict[str, Any], measured: dict[str, Any] | None) -> dict[str, list[float | None]]:
    from forge.report.prediction import compare

    assert measured is not None
    return {c.key: [c.predicted, c.measured, c.error] for c in compare(said, measured) if c.key in SHOWN}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Recorded quickstarts, predicted again",
        "",
        "Made by `python reports/repredict.py RUN...`: predicted by the simulator as it is now / measured then, and",
        "the error (of a share the difference).",
    ]
    for source in ("probe", "first minute"):
        lines += ["", f"From the {source}:", "", "| figure | " + " | ".join(r["run"] for r in rows) + " |"]
        lines.append("|---|" + "---|" * len(rows))
        keys = [key for key in SHOWN if any(key in r[source] for r in rows)]
        lines += [f"| {key} | " + " | ".join(_cell(key, r[source].get(key)) for r in rows) + " |" for key in keys]
    return "\n".join(lines) + "\n"


def _cell(key: str, figure: list[float | None] | None) -> str:
    if figure is None or None in figure:
        return ""
    predicted, measured, error = figure
    shown = f"{error:+.2f}" if key.endswith("_fraction") else f"{error:+.1%}"
    return f"{predicted:.3g} / {measured:.3g} ({shown})"


if __name__ == "__main__":
    main()
