"""The speed bench on a made-up trace: every figure is there, errors are exactly 0, nulls come with their reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.types import ForgeError
from sim import speed_bench


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Sixty requests; every third goes on from the one three before it."""
    lines = []
    for i in range(60):
        blocks = 2 + i // 3 % 9
        hashes = [1000 * (i % 3) + k for k in range(blocks)]
        row = {"timestamp": 400 * i, "input_length": 512 * blocks, "output_length": 5 + i % 50, "hash_ids": hashes}
        lines.append(json.dumps(row))
    path = tmp_path / speed_bench.TRACE
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n")
    return tmp_path


def test_figures(data: Path) -> None:
    result = speed_bench.run(data, 0, stepped=40, judged=30)
    figures = result["figures"]
    assert figures["stepped_max_error_s"] == 0.0
    assert figures["oracle_max_error_s"] == 0.0
    assert figures["requests_per_s"] > 0
    assert figures["ratio_vs_stepped"] > 0
    assert figures["iterations_per_jump"] > 1
    assert figures["campaign_calls_per_s"] is None
    assert list(result["reasons"]) == ["campaign_calls_per_s"]


def test_the_interpreted_child_measures_rates_and_nothing_else(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumped: list[bool] = []
    serve = speed_bench._serve
    monkeypatch.setattr(speed_bench, "_serve", lambda trace, jump: jumped.append(jump) or serve(trace, jump=jump))
    monkeypatch.setattr(speed_bench, "_against_oracle", lambda *_: pytest.fail("judged"))
    figures = speed_bench.run(data, 0, rates_only=True)["figures"]
    assert jumped == [True] * speed_bench.TRIES
    assert set(figures) == {*speed_bench.RATES, speed_bench.LOOP}
    child = speed_bench._child(data, 0, pure=True)
    assert set(child["figures"]) == set(figures)
    assert "core interpreted" in child["protocol"]


def test_without_data() -> None:
    result = speed_bench.run(None, 0)
    assert result["figures"].pop(speed_bench.LOOP) > 0
    assert set(result["figures"].values()) == {None}
    assert set(result["reasons"]) == set(result["figures"])
    assert speed_bench.SOURCE in result["reasons"]["requests_per_s"]


def test_without_oracle(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_bench, "_oracle", lambda: None)
    result = speed_bench.run(data, 0, stepped=10, judged=10)
    assert result["figures"]["oracle_max_error_s"] is None
    assert "checkout" in result["reasons"]["oracle_max_error_s"]


def test_no_such_folder() -> None:
    with pytest.raises(ForgeError, match="no such folder"):
        speed_bench.run(Path("/nowhere"), 0)
