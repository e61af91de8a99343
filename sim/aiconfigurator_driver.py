"""Run by a Python that has AIConfigurator, not by ours: `python aiconfigurator_driver.py QUERIES ANSWERS`.

QUERIES: a JSON list of keyword arguments of its `cli_estimate`. ANSWERS, written: a list with `{"ttft_ms", "tpot_ms"}`
or `{"refused": reason}` for each, in order. Imports nothing of Forge, and nothing that is not in the standard library
before it is asked to.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(queries: Path, answers: Path) -> None:
    logging.disable(logging.WARNING)
    yaml: Any = importlib.import_module("yaml")
    # It reads hundreds of descriptions anew for every estimate: seconds with the parser in Python, a tenth in C.
    yaml.safe_load = lambda text: yaml.load(text, yaml.CSafeLoader)
    estimate = importlib.import_module("aiconfigurator.cli.api").cli_estimate
    asked = json.loads(queries.read_text(encoding="utf-8"))
    answers.write_text(json.dumps([answer(estimate, one) for one in asked]), encoding="utf-8")


def answer(estimate: Callable[..., Any], query: dict[str, Any]) -> dict[str, Any]:
    """What it refuses it says by exceptions of many kinds, its own and of libraries."""
    try:
        found = estimate(**query)
        return {"ttft_ms": float(found.ttft), "tpot_ms": float(found.tpot)}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
