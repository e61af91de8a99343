"""Measured serving points: cleaning, the fit's parameter recovery, cross-validation, figures, the loader's errors."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from forge.cli import main
from forge.cost import CostModel, Deployment, Efficiencies, Precision, hardware, model_card
from forge.types import ForgeError
from sim import accuracy, accuracy_bench, serving_fit
from sim.accuracy_data import TABLE, Cell, Key, load
from sim.serving import Points, Serving, ttft_tpot

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not (DATA / TABLE).exists(), reason=f"{DATA / TABLE}: absent")


def deployment(model: str = "llama_3_1_8b", tp: int = 1, system: str = "h200_sxm") -> Deployment:
    precision = Precision(dense="fp8", experts="fp8")
    return Deployment(model=model_card(model), hardware=hardware(system), precision=precision, tp=tp)


def cells_of(on: Deployment, backend: str, version: str, truth: serving_fit.Fitted | None = None) -> list[Cell]:
    key = Key(
        model=on.model.name,
        system=on.hardware.name,
        backend=backend,
        version=version,
        precision="fp8",
        gemm="fp8",
        moe="fp8",
        tp=on.tp,
        moe_tp=on.tp,
        ep=1,
    )
    loads = [(c, isl, osl) for c in (4, 16, 64) for isl, osl in ((1024, 1024), (8192, 1024), (1024, 256))]
    blank = [Cell(key=key, on=on, isl=isl, osl=osl, concurrency=c, ttft_s=1.0, tpot_s=1.0) for c, isl, osl in loads]
    if truth is None:
        return blank
    ttft, tpot = truth.predict(blank)
    return [
        Cell(key=key, on=on, isl=b.isl, osl=b.osl, concurrency=b.concurrency, ttft_s=float(f), tpot_s=float(p))
        for b, f, p in zip(blank, ttft, tpot, strict=True)
    ]


def synthetic(truth: serving_fit.Fitted | None = None) -> list[Cell]:
    return [
        cell
        for on in (deployment(), deployment(tp=4), deployment("llama_3_1_70b", 4), deployment("minimax_m2_5", 8))
        for backend, version in (("vllm", "0.16.0"), ("sglang", "0.5.9"))
        for cell in cells_of(on, backend, version, truth)
    ]


def true_fit() -> serving_fit.Fitted:
    """Backends that differ by a factor in overhead and prefill, models that do in decoding."""
    design = serving_fit.Design.of(synthetic())
    betas = np.zeros(len(design.columns))
    values = {
        ("flops", "", ""): -0.2,
        ("bandwidth", "", ""): 0.1,
        ("layer_s", "", ""): 0.3,
        ("layer_s", "backend", "vllm"): 0.4,
        ("flops", "backend", "sglang"): 0.15,
        ("request_s", "backend", "vllm"): -0.5,
        ("burst", "version", "sglang 0.5.9"): 0.8,
    }
    for column, value in values.items():
        betas[design.columns.index(column)] = value
    return serving_fit.Fitted(design, betas)


def test_the_fit_finds_what_points_were_made_of() -> None:
    """Its predictions of a deployment it has not seen, and the parameters that the points identify."""
    truth = true_fit()
    cells = synthetic(truth)
    fitted = serving_fit.fit(cells)
    unseen = cells_of(deployment(tp=2), "vllm", "0.16.0", truth)
    for found, made in zip(fitted.predict([*cells, *unseen]), truth.predict([*cells, *unseen]), strict=True):
        assert found == pytest.approx(made, rel=0.05)
    ours, theirs = fitted.parameters(cells), truth.parameters(cells)
    # An overhead a layer shares what it explains with one a row, a collective or a decode factor.
    for name, tolerance in {"bandwidth": 0.1, "flops": 0.15, "request_s": 0.2, "layer_s": 0.4}.items():
        assert ours[name] == pytest.approx(theirs[name], rel=tolerance), name


def test_an_unseen_version_gets_no_effect() -> None:
    fitted = serving_fit.fit(synthetic(true_fit()))
    new, unknown = (cells_of(deployment(), "vllm", version) for version in ("0.16.7", ""))
    assert all(np.isfinite(fitted.predict(cells)).all() for cells in (new, unknown))
    stranger = cells_of(deployment(), "new engine", "1")
    assert fitted.parameters(stranger)["layer_s"] == pytest.approx(
        serving_fit.PRIORS["layer_s"].value
        * np.exp(_beta(fitted, "layer_s") + _beta(fitted, "layer_s", "Llama-3.1-8B"))
    )


def _beta(fitted: serving_fit.Fitted, name: str, level: str = "") -> float:
    return sum(
        float(beta)
        for (parameter, _, own), beta in zip(fitted.design.columns, fitted.betas, strict=True)
        if parameter == name and own == level
    )


def test_jacobian_is_the_slope() -> None:
    cells = synthetic(true_fit())
    problem = serving_fit._Problem(cells, serving_fit.Design.of(cells))
    at = np.random.default_rng(0).normal(0.0, 0.1, len(problem.design.sigma))
    analytic, step = problem.jacobian(at), 1e-5
    for j in range(0, len(at), 7):
        ahead = at.copy()
        ahead[j] += step
        slope = (problem.residuals(ahead) - problem.residuals(at)) / step
        assert analytic[:, j] == pytest.approx(slope, abs=2e-2)


def test_generations() -> None:
    told = {v: serving_fit.generation("vllm", v) for v in ("0.12.0", "0.17.0", "0.18.0", "1.0", "", "dev")}
    assert told == {
        "0.12.0": "before 0.17",
        "0.17.0": "0.17 or newer",
        "0.18.0": "0.17 or newer",
        "1.0": "0.17 or newer",
        "": "?",
        "dev": "?",
    }
    assert serving_fit.generation("trtllm", "1.0.0rc3") == "1"


def test_serving_model_is_monotone() -> None:
    """More requests, longer prompts, slower iterations: never a shorter TTFT; TPOT likewise."""
    by, serving = Efficiencies(), Serving()
    loads = [(4, 1024, 256), (8, 1024, 256), (8, 2048, 256), (64, 2048, 256)]
    for on in (deployment(), deployment("deepseek_v3", 8)):
        for seconds in ttft_tpot(Points.of([(on, *one) for one in loads]), by, serving):
            assert (np.diff(seconds) > 0).all()


def test_one_request_alone_waits_for_nobody() -> None:
    on = deployment()
    ttft, tpot = ttft_tpot(Points.of([(on, 1, 1000, 100)]), Efficiencies(), Serving(waits=0.0, chunk=1e12))
    model = CostModel(on)
    alone = model.iteration(1, 1050, [(1000, 0)]) - model.iteration(1, 1050)
    assert tpot == pytest.approx(model.iteration(1, 1050))
    assert ttft == pytest.approx(0.05 + alone, rel=1e-6)


def test_whole_deployments_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = synthetic(true_fit())
    seen: list[set[Key]] = []
    whole = serving_fit.fit(cells)

    def fit(rest: list[Cell]) -> serving_fit.Fitted:
        seen.append({cell.key for cell in rest})
        return whole

    monkeypatch.setattr(accuracy, "fit", fit)
    scored = accuracy.cross_validate(cells)
    keys = {cell.key for cell in cells}
    assert [keys - one for one in seen] == [{key} for key in dict.fromkeys(cell.key for cell in cells)]
    assert len(scored) == len(cells)
    alone = {one.cell.on.model.name for one in scored if not one.sibling}
    assert alone == {"Llama-3.1-70B", "MiniMax-M2.5"}, "Llama 8B has TP1 and TP4 on each backend"


def test_error_bars_hold_their_share() -> None:
    """Of left-out errors; too few to say give no bar at all."""
    cells = synthetic(true_fit())
    rng = np.random.default_rng(1)
    ones = [
        accuracy.Prediction(
            cell=cell, ttft_s=cell.ttft_s * float(np.exp(rng.normal(0, 0.2))), tpot_s=cell.tpot_s, sibling=True
        )
        for cell in cells
    ]
    learnt = accuracy.bars(ones)
    held = np.mean([one.log_error("ttft") <= learnt["ttft", True] for one in ones])
    assert held == pytest.approx(accuracy.COVERAGE, abs=0.05)
    assert learnt["ttft", True] == pytest.approx(0.2 * 1.28, rel=0.25)
    assert accuracy.bars(ones[:2])["ttft", True] == np.inf


def test_calibration_predicts_with_bars() -> None:
    calibration = accuracy.calibrate(synthetic(true_fit()))
    (one, *_) = calibration.predict(cells_of(deployment(tp=2), "vllm", "0.16.0", true_fit()))
    assert one.sibling
    assert one.error("tpot") < 0.1
    assert 0 < one.tpot_bar < 0.2
    assert calibration.predict([]) == []
    model = calibration.cost_model(one.cell)
    assert model.error == {"ttft": one.ttft_bar, "tpot": one.tpot_bar}
    decode = model.iteration(one.cell.concurrency, one.cell.concurrency * (one.cell.isl + one.cell.osl // 2))
    assert 0 < decode < one.tpot_s, "TPOT has the interference of others' prefill besides"
    with pytest.raises(ForgeError, match="fewer than two deployments"):
        accuracy.calibrate(cells_of(deployment(), "vllm", "1", true_fit()))


@needs_data
def test_cleaning_counts_are_those_of_simulation_md() -> None:
    table = load(DATA)
    assert table.rows == 919
    assert len(table.clean) == 742
    assert len({cell.key for cell in table.clean}) == 40
    assert dict(table.excluded) == {
        "tp_size > 8": 14,
        "attention_dp_size > 1": 13,
        "MoE width != tp": 19,
        "deployments with fewer than 3 rows": 13,
        "Llama-3.1-8B-FP8 on vLLM": 7,
        "gpt-oss at concurrency 512": 3,
        "implied MFU > 0.62": 2,
        "KV-saturated (scored apart)": 53,
    }
    minimax = [cell for cell in table.clean if cell.on.model.name == "MiniMax-M2.5"]
    assert (sum(cell.rows for cell in minimax), len(minimax), len({cell.key for cell in minimax})) == (51, 33, 2)


HEADER = (
    "id,backend,backend_version,model_path,system,precision,mode,isl,osl,gemm_quant_mode,moe_quant_mode,batch_size,"
    "tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"
)
ROW = "a,vllm,0.16.0,Qwen/Qwen3-32B,h100_sxm,fp8,agg,1024,512,fp8,fp8,{c},2,1,,1,1,100,20"


def write(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / TABLE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return folder


def test_rows_nobody_can_describe_are_counted(tmp_path: Path) -> None:
    good = [ROW.format(c=c) for c in (4, 8, 16)]
    strange = [
        good[0].replace("Qwen/Qwen3-32B", "x/y"),
        good[0].replace("h100_sxm", "z1"),
        good[0].replace(",20", ",0"),
    ]
    table = load(write(tmp_path, *good, *strange, good[0].replace("fp8,fp8,4", "fp7,fp8,4")))
    assert len(table.clean) == 3
    assert dict(table.excluded) == {
        "no description of the model": 1,
        "no description of the hardware": 1,
        "no positive TTFT and TPOT": 1,
        "unknown quantisation": 1,
    }


def test_repeats_are_merged_by_median(tmp_path: Path) -> None:
    rows = [ROW.format(c=4).replace(",100,", f",{ms},") for ms in (100, 130, 500)]
    (cell,) = load(write(tmp_path, *rows)).clean
    assert (cell.ttft_s, cell.rows) == (0.13, 3)


def test_loader_errors_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"hopper_serving_measured.csv: cannot be read: No such file"):
        load(tmp_path)
    with pytest.raises(ForgeError, match=r"csv:3: not a measured serving point: .*'many'"):
        load(write(tmp_path, ROW.format(c=4), ROW.format(c="many")))
    with pytest.raises(ForgeError, match=r"csv:2: no column 'isl'"):
        load(write(tmp_path, ROW.format(c=4), header=HEADER.replace("isl", "input")))
    with pytest.raises(ForgeError, match="csv:2: not a measured"):
        load(write(tmp_path, "a,vllm"))


def test_without_data_every_figure_is_null_with_its_source(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        result = accuracy_bench.run(folder)
        assert set(result["figures"]) == set(result["reasons"])
        assert not any(result["figures"].values())
        assert "ai-dynamo/aiconfigurator" in result["reasons"]["tpot_mape_all"]
    with pytest.raises(ForgeError, match="--data nowhere: no such folder"):
        accuracy_bench.run(Path("nowhere"))
    with pytest.raises(ForgeError, match="--calibration nowhere: no such folder"):
        accuracy_bench.run(tmp_path, Path("nowhere"))


def rows_of(cells: list[Cell]) -> list[str]:
    names = {"Llama-3.1-8B": "meta-llama/Llama-3.1-8B", "Llama-3.1-70B": "meta-llama/Llama-3.1-70B"}
    names["MiniMax-M2.5"] = "MiniMaxAI/MiniMax-M2.5"
    return [
        f"a,{k.backend},{k.version},{names[k.model]},h200_sxm,fp8,agg,{c.isl},{c.osl},fp8,fp8,{c.concurrency},"
        f"{k.tp},1,1,{k.moe_tp},1,{c.ttft_s * 1e3},{c.tpot_s * 1e3}"
        for c in cells
        for k in (c.key,)
    ]


def test_command_fits_on_one_folder_and_scores_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = true_fit()
    here = write(tmp_path / "here", *rows_of(cells_of(deployment(tp=2), "vllm", "0.16.0", truth)))
    there = write(tmp_path / "there", *rows_of(synthetic(truth)))
    args = ["forge", "bench", "sim-accuracy", "--data", str(here), "--calibration", str(there)]
    monkeypatch.setattr(sys, "argv", [*args, "--json"])
    assert main() == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = printed["figures"]
    assert figures["cells"] == 9
    assert figures["tpot_mape_all"] < 0.1
    assert figures["tpot_mape_minimax_m25"] is None
    assert printed["reasons"]["tpot_mape_minimax_m25"] == "no cell of this kind"
    assert {name for name, value in figures.items() if value is None} == set(printed["reasons"])
    monkeypatch.setattr(sys, "argv", args)
    assert main() == 0
    assert "TPOT mean" in capsys.readouterr().out


@needs_data
def test_the_table_is_read_by_its_own_columns() -> None:
    with (DATA / TABLE).open(encoding="utf-8") as file:
        assert csv.DictReader(file).fieldnames == HEADER.split(",")


@needs_data
@pytest.mark.slow
def test_accuracy_on_left_out_deployments() -> None:
    figures = accuracy_bench.run(DATA)["figures"]
    assert figures["tpot_mape_minimax_m25"] <= 0.10
    assert figures["ttft_mape_minimax_m25"] <= 0.20
    assert figures["tpot_mape_vllm"] <= 0.07
    assert figures["ttft_mape_vllm"] <= 0.13
    assert figures["tpot_mape_all"] <= 0.12
    assert figures["ttft_mape_all"] <= 0.25
    assert figures["tpot_median_all"] <= 0.07
    assert figures["ttft_median_all"] <= 0.14
