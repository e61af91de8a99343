"""`forge calibrate` from operator tables and serving points: recovery, protocols, the command and its file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from forge.cli import main
from forge.cost import CostModel, Deployment, Efficiencies, hardware, load_calibration, model_card, work
from forge.cost.tables import Rows
from forge.types import ForgeError
from sim import points, table_fit
from sim.points import CELLS, DEPLOYMENTS, calibrate_points

DATA = Path(__file__).parents[3] / "shared" / "data" / "aiconfigurator"
needs_data = pytest.mark.skipif(not (DATA / "h200_sxm").exists(), reason=f"{DATA / 'h200_sxm'}: absent")
H200 = hardware("h200_sxm")


def drawn(name: str, n: int = 400) -> Rows:
    """A table of random shapes, latencies blank."""
    rng = np.random.default_rng(0)

    def power(low: int, high: int) -> np.ndarray:
        return 2.0 ** rng.integers(low, high, n)

    every = {
        "gemm": {"m": power(0, 15), "n": power(8, 15), "k": power(8, 15)},
        "moe": {
            "num_tokens": power(0, 15),
            "hidden_size": power(11, 14),
            "inter_size": power(9, 12),
            "topk": power(0, 4),
            "num_experts": power(5, 9),
            "moe_tp_size": power(0, 3),
            "moe_ep_size": power(0, 3),
        },
        "context_attention": {"isl": power(4, 15), "step": 0 * power(0, 1)},
        "generation_attention": {"isl": power(0, 1), "step": power(0, 16)},
        "custom_allreduce": {"num_gpus": power(1, 4), "message_size": power(7, 28)},
    }
    columns = dict(every[name])
    if "attention" in name:
        heads = {"num_heads": power(3, 7), "num_key_value_heads": power(0, 3)}
        columns |= {"batch_size": power(0, 8), "head_dim": 128.0 + 0 * power(0, 1)} | heads
    operator = table_fit.OPERATORS[name]
    columns[operator.formats] = rng.choice(["bfloat16", "fp8", "fp8_block"], n)
    return Rows(columns, np.ones(n), "1.0", Counter())


@pytest.mark.parametrize("name", table_fit.OPERATORS)
def test_a_table_gives_what_it_was_made_of(name: str) -> None:
    """With noise of 5%; the errors told are of that size."""
    operator, rows = table_fit.OPERATORS[name], drawn(name)
    names = (*operator.efficiencies, *operator.overheads)
    truth = {one: table_fit._centre(one) * factor for one, factor in zip(names, (1.3, 0.8, 1.05, 2.0), strict=False)}
    noise = np.exp(np.random.default_rng(1).normal(0.0, 0.05, len(rows.seconds)))
    (found,) = table_fit.fit(
        {name: Rows(rows.columns, operator.model(rows, H200)(truth) * noise, "1", Counter())}, H200
    ).values()
    for key, value in (found.efficiencies | found.overheads).items():
        assert value == pytest.approx(truth[key], rel=0.1), key
    assert found.mean == pytest.approx(0.04, abs=0.01)
    for key, value in found.efficiencies.items():
        assert getattr(table_fit.efficiencies({name: found}), key) == value


def test_a_format_nobody_knows_is_counted() -> None:
    rows = drawn("gemm")
    rows.columns["gemm_dtype"] = np.where(np.arange(len(rows.seconds)) < 30, "fp5", "fp8")
    (found,) = table_fit.fit({"gemm": rows}, H200).values()
    assert found.excluded == {table_fit.UNKNOWN: 30}


def test_a_collective_is_that_of_the_cost_model() -> None:
    """Twice a layer in `work`, once here; elements of two bytes."""
    on = Deployment(model=model_card("llama_3_1_70b"), hardware=H200, tp=8)
    rows = Rows({"num_gpus": np.array([8.0]), "message_size": np.array([on.model.hidden * 7.0])}, np.ones(1), "1")
    alone = table_fit._allreduce(rows, H200)({"collective_s": 0.0, "link": 1.0})[0]
    whole = work(on, 7)
    assert float(whole.link) == pytest.approx(float(whole.collectives) * alone)


HEADER = "model_path,system,backend,tp_size,isl,osl,batch_size,silicon_ttft_ms,silicon_tpot_ms"


def csv_of(path: Path, *deployments: tuple[str, int], loads: tuple[int, ...] = (1, 4, 16)) -> Path:
    """Rows that the untuned cost model would give, with only the columns that are needed."""
    lines = [HEADER]
    for model, tp in deployments:
        cost = CostModel(Deployment(model=model_card(model), hardware=H200, tp=tp))
        for c in loads:
            for isl in (1024, 4096):
                decode_s, prefill_s = cost.iteration(c, c * (isl + 128)), cost.prefill(isl)
                ttft, tpot = 1e3 * (0.05 + prefill_s), 1e3 * (decode_s + (c - 1) * prefill_s / 256)
                lines.append(f"{model},h200_sxm,vllm,{tp},{isl},256,{c},{ttft:.3f},{tpot:.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_one_deployment_leaves_out_cells(tmp_path: Path) -> None:
    found = calibrate_points(csv_of(tmp_path / "p.csv", ("minimax_m2_5", 4)))
    assert found.protocol == CELLS
    (one,) = found.deployments.values()
    assert 0 < one.error["tpot"] < 0.3
    assert 0 < one.error["ttft"] < 1.0
    assert len(found.table.clean) == 6


def test_several_leave_out_deployments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = csv_of(tmp_path / "p.csv", ("qwen3_8b", 1), ("qwen3_32b", 2), ("qwen3_32b", 4))
    left: list[tuple[int, int]] = []
    found = calibrate_points(path, lambda done, of: left.append((done, of)))
    assert found.protocol == DEPLOYMENTS
    assert left == [(1, 3), (2, 3), (3, 3)]
    assert len(found.deployments) == 3
    bars = {tuple(one.error.items()) for one in found.deployments.values()}
    assert len(bars) == 1
    monkeypatch.setattr(points, "SEVERAL", 4)
    assert calibrate_points(path).protocol == CELLS


def test_too_few_points_name_the_file(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "p.csv", ("qwen3_8b", 1), loads=(4, 8))
    with pytest.raises(ForgeError, match=r"p.csv: 4 clean points; error bars need 5"):
        calibrate_points(path)
    path.write_text(HEADER + "\n")
    with pytest.raises(ForgeError, match=r"p.csv: no clean serving point in 0 rows: it is empty"):
        calibrate_points(path)
    path.write_text(HEADER.replace("isl,", "") + "\na,b,c,1,2,3,4,5\n")
    with pytest.raises(ForgeError, match=r"p.csv:2: no column 'isl'"):
        calibrate_points(path)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["forge", "calibrate", *args])
    return main()


def test_the_command_wants_one_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in ([], ["latest", "--points", "p.csv"], ["--table", ".", "--points", "p.csv"]):
        assert run(monkeypatch, *args) == 2
        assert "exactly one of RUN, --table DIR and --points CSV" in capsys.readouterr().err
    assert run(monkeypatch, "--table", str(tmp_path / "none"), "-o", str(tmp_path / "c.toml")) == 2
    assert "none: no such folder" in capsys.readouterr().err
    assert run(monkeypatch, "--points", str(tmp_path / "none.csv"), "-o", str(tmp_path / "c.toml")) == 2
    assert "none.csv: cannot be read" in capsys.readouterr().err


def test_points_become_a_file_that_the_cost_model_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = csv_of(tmp_path / "p.csv", ("minimax_m2_5", 4)), tmp_path / "c.toml"
    assert run(monkeypatch, "--points", str(path), "-o", str(out), "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    (one,) = told["deployments"].values()
    on = Deployment(model=model_card("minimax_m2_5"), hardware=H200, tp=4)
    model = CostModel.from_toml(out, on)
    assert model.error == one["error"]
    assert set(model.error) == {"ttft", "tpot"}
    assert model.iteration(4, 4000) == pytest.approx(CostModel(on).iteration(4, 4000), rel=0.15)
    assert run(monkeypatch, "--points", str(path), "-o", str(out)) == 0
    assert "TPOT within" in capsys.readouterr().out


@needs_data
def test_a_real_table_becomes_efficiencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.toml"
    assert run(monkeypatch, "--table", str(DATA / "h200_sxm"), "-o", str(out)) == 0
    printed = capsys.readouterr().out
    assert "left out: 27293 rows, within 1.5 of the host's floor" in printed
    found = load_calibration(out, "h200_sxm vllm 0.24.0")
    assert found.error == {}
    for name in ("flops", "bandwidth", "attention_flops", "attention_bandwidth", "link"):
        assert 0.3 < float(getattr(found.efficiencies, name)) < 0.95, name
    assert found.efficiencies.step_s == Efficiencies().step_s
