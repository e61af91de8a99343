"""AIConfigurator beside ours: what it is asked, its refusals, a Python without it, and the real one where it is."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.cost import Deployment, Precision, hardware, model_card
from forge.types import ForgeError
from sim import accuracy_bench, aiconfigurator, aiconfigurator_driver
from sim.accuracy import Prediction
from sim.accuracy_data import Cell, Key
from sim.aiconfigurator import Estimate

PYTHON = os.environ.get("FORGE_AICONFIGURATOR", "")
needs_it = pytest.mark.skipif(not PYTHON, reason="FORGE_AICONFIGURATOR: not set to a Python with aiconfigurator")


def cell(model: str = "MiniMaxAI/MiniMax-M2.5", gemm: str = "fp8", concurrency: int = 16) -> Cell:
    on = Deployment(model=model_card(model), hardware=hardware("h200_sxm"), precision=Precision(dense="fp8"), tp=4)
    key = Key(
        model=model,
        system="h200_sxm",
        backend="vllm",
        version="0.16.0",
        precision="fp8",
        gemm=gemm,
        moe=gemm,
        tp=4,
        moe_tp=4,
        ep=1,
    )
    return Cell(key=key, on=on, isl=1024, osl=512, concurrency=concurrency, ttft_s=0.2, tpot_s=0.02)


def test_what_is_asked() -> None:
    asked = {"system_name": "h200_sxm", "backend_name": "vllm", "isl": 1024, "osl": 512, "batch_size": 16, "tp_size": 4}
    experts = {"model_path": "MiniMaxAI/MiniMax-M2.5", "moe_tp_size": 4, "moe_ep_size": 1}
    assert aiconfigurator.query(cell()) == asked | experts
    dense = aiconfigurator.query(cell("meta-llama/Llama-3.1-70B"))
    assert dense == asked | {"model_path": "meta-llama/Meta-Llama-3.1-70B", "gemm_quant_mode": "fp8"}
    assert "gemm_quant_mode" not in aiconfigurator.query(cell("Qwen/Qwen3-32B", ""))


def test_the_driver_answers_in_order_and_says_why_not(tmp_path: Path) -> None:
    """Run as it is run, on a package of the same name that stands in for the real one."""
    (tmp_path / "aiconfigurator" / "cli").mkdir(parents=True)
    (tmp_path / "aiconfigurator" / "cli" / "api.py").write_text(
        "from types import SimpleNamespace\n"
        "def cli_estimate(tp_size, **rest):\n"
        "    if tp_size > 4:\n"
        "        raise LookupError('no tables\\nfor this width')\n"
        "    return SimpleNamespace(ttft=100.0 * tp_size, tpot=5.0)\n"
    )
    (tmp_path / "yaml.py").write_text("CSafeLoader = None\n")
    python = tmp_path / "python"
    # The stand-in interpreter: ours, isolated as it was asked to be, with the stand-in package in front.
    inner = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = sys.argv[1:]"
    python.write_text(
        f"#!/bin/sh\nshift\nexec {sys.executable} -I -c \"{inner}; runpy.run_path(sys.argv[0], run_name='__main__')\" "
        '"$@"\n'
    )
    python.chmod(0o755)
    wide = replace(cell(), key=replace(cell().key, tp=8))
    told = aiconfigurator.estimates(python, [cell(), wide])
    assert told == [Estimate(ttft_s=0.4, tpot_s=0.005), Estimate(refused="LookupError: no tables")]


def test_refusals_have_one_line() -> None:
    def refuses(**_: Any) -> None:
        raise ValueError("first\nsecond")

    assert aiconfigurator_driver.answer(refuses, {}) == {"refused": "ValueError: first"}


def test_figures_are_of_the_cells_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Estimate(ttft_s=0.3, tpot_s=0.02), Estimate(refused="no tables"), Estimate(ttft_s=0.2, tpot_s=0.03)]
    monkeypatch.setattr(aiconfigurator, "estimates", lambda *_: told)
    ours = [Prediction(cell=cell(), ttft_s=s, tpot_s=0.02, sibling=True) for s in (0.22, 9.0, 0.2)]
    result = aiconfigurator.compare(Path("python"), ours)
    assert result["refused"] == {"no tables": 1}
    assert result["figures"] == {
        "aiconfigurator_cells": 2,
        "aiconfigurator_ttft_mape": pytest.approx(0.25),
        "aiconfigurator_tpot_mape": pytest.approx(0.25),
        "ours_ttft_mape_on_its_rows": pytest.approx(0.05),
        "ours_tpot_mape_on_its_rows": pytest.approx(0.0),
    }
    assert set(result["figures"]) == set(aiconfigurator.FIGURES)
    monkeypatch.setattr(aiconfigurator, "estimates", lambda *_: told[1:2])
    nothing = aiconfigurator.compare(Path("python"), ours[:1])["figures"]
    assert nothing == {name: 0 if name == "aiconfigurator_cells" else None for name in aiconfigurator.FIGURES}


def test_a_python_without_it_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"--aiconfigurator .*No module named .*aiconfigurator==0.12.0 installed"):
        aiconfigurator.estimates(Path(sys.executable), [cell()])
    with pytest.raises(ForgeError, match="cannot be run"):
        aiconfigurator.estimates(tmp_path / "none", [cell()])


def test_the_bench_says_why_figures_are_null(tmp_path: Path) -> None:
    result = accuracy_bench.run(tmp_path)
    assert {*aiconfigurator.FIGURES, accuracy_bench.STALENESS} <= {k for k, v in result["figures"].items() if v is None}
    assert "volcengine/verl" in result["reasons"][accuracy_bench.STALENESS]
    with pytest.raises(ForgeError, match="--aiconfigurator nowhere: no such file"):
        accuracy_bench.run(tmp_path, rival=Path("nowhere"))


@needs_it
def test_the_real_one_accepts_minimax_at_tp4_and_refuses_a_model_it_has_not() -> None:
    (one, other) = aiconfigurator.estimates(
        Path(PYTHON), [cell(), replace(cell(), key=replace(cell().key, backend="none"))]
    )
    assert 0.05 < one.ttft_s < 1.0
    assert 0.005 < one.tpot_s < 0.05
    assert other.refused
