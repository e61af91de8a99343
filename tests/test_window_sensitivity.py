"""The report on windows runs, in its quick form, and says what its rows say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

REPORTS = Path(__file__).parent.parent / "reports"


@pytest.fixture(autouse=True)
def reports_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(REPORTS), *sys.path])


def test_the_quick_form_writes_everything(tmp_path: Path) -> None:
    from window_sensitivity import main

    main(["--quick", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "results.json").read_text())
    names = {row["name"] for row in result["rows"]}
    assert {"0 N", "0.3 N", "1 N", "adaptive"} <= names
    assert any("E=4" in name for name in names)
    assert all(len(row["runs"]) == len(result["seeds"]) == 2 for row in result["rows"])
    text = (tmp_path / "results.md").read_text()
    assert "## The straggler escape" in text
    assert {p.name for p in tmp_path.iterdir()} == {"results.json", "results.md", "front.png", "stall.png"}


def test_who_dominates_is_better_beyond_noise_and_nowhere_worse() -> None:
    from window_sensitivity_pages import dominates

    def row(speed: float, unrest: float) -> dict[str, object]:
        runs = [
            {"items_per_min": speed + s, "nonstationarity": unrest + s / 10, "lag_mean": 5.0} for s in (0.0, 1.0, 2.0)
        ]
        return {"runs": runs}

    assert dominates(row(9.0, 1.0), row(8.0, 1.0))
    assert not dominates(row(8.0, 1.0), row(8.0, 1.0))
    assert not dominates(row(9.0, 1.1), row(8.0, 1.0))
    assert not dominates(row(8.0, 0.99), row(8.0, 1.0))
    assert dominates(row(8.0, 0.95), row(8.0, 1.0))
