"""Calibrations in TOML, read back by the cost model; operator tables as the loader reads and cleans them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w

from forge.cost import Calibrated, CostModel, Deployment, Efficiencies, hardware, load_calibration, model_card
from forge.cost.tables import EAGER, FLOOR, NOT_POSITIVE, WINDOWED, read
from forge.types import ForgeError

DATA = Path(__file__).parents[2] / "shared" / "data" / "aiconfigurator"
needs_data = pytest.mark.skipif(not (DATA / "h200_sxm").exists(), reason=f"{DATA / 'h200_sxm'}: absent")
FOUND = Calibrated(
    efficiencies=Efficiencies(flops=0.5, row_s=3e-6), decode_factor=1.1, prefill_factor=0.9, error={"ttft": 0.2}
)


def write(path: Path, **deployments: Calibrated) -> Path:
    path.write_text(tomli_w.dumps({"deployments": {name: one.to_dict() for name, one in deployments.items()}}))
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", one=FOUND)
    assert load_calibration(path) == load_calibration(path, "one") == FOUND
    on = Deployment(model=model_card("qwen3_8b"), hardware=hardware("h200_sxm"))
    model = CostModel.from_toml(path, on)
    assert (model.on, model.by, model.error) == (on, FOUND.efficiencies, {"ttft": 0.2})
    plain = CostModel(on, FOUND.efficiencies)
    assert model.iteration(4, 4000) == pytest.approx(1.1 * plain.iteration(4, 4000))
    added = plain.iteration(4, 4000, [(512, 0)]) - plain.iteration(4, 4000)
    assert model.iteration(4, 4000, [(512, 0)]) - model.iteration(4, 4000) == pytest.approx(0.9 * added)


def test_an_unknown_bar_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", one=replace(FOUND, error={"ttft": float("inf"), "tpot": 0.1}))
    assert load_calibration(path).error == {"tpot": 0.1}


def test_one_of_several_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", one=FOUND, two=Calibrated())
    assert load_calibration(path, "two") == Calibrated()
    with pytest.raises(ForgeError, match=r"c.toml: name a deployment; it has one; two"):
        load_calibration(path)
    with pytest.raises(ForgeError, match="three: no such deployment; it has one; two"):
        load_calibration(path, "three")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "c.toml: x: unknown key"),
        ("[deployments.a]\nefficiency = 1", "deployments.a.efficiency: unknown key"),
        ("[deployments.a.efficiencies]\nflop = 1", "deployments.a.efficiencies.flop: unknown key"),
        ("[deployments.a.error]\ne2e = 1", "deployments.a.error.e2e: unknown key; known are ttft, tpot"),
        ("[deployments.a.factors]\ndecode = 0", "deployments.a.factors.decode = 0: must be a positive number"),
        ("[deployments.a.factors]\ndecode = true", "decode = True: must be a positive number"),
        ("[deployments]\na = 1", "deployments.a = 1: must be a table"),
        ("deployments = [", "not a readable TOML file"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ForgeError, match=message.replace("[", r"\[")):
        load_calibration(path)


# --- operator tables ------


def table(folder: Path, operator: str, name: str, version: str = "1.9", **columns: list[float] | list[str]) -> Path:
    path = folder / operator / "vllm" / version / f"{name}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def gemm(folder: Path, latency: list[float], kernel: str = "fast", version: str = "1.9") -> Path:
    n = len(latency)
    return table(
        folder,
        "gemm",
        "gemm",
        version,
        m=[1.0] * n,
        n=[64.0] * n,
        k=[64.0] * n,
        gemm_dtype=["fp8"] * n,
        kernel_source=[kernel] * n,
        latency=latency,
    )


def test_the_newest_version_is_read(tmp_path: Path) -> None:
    gemm(tmp_path, [0.01], version="0.9.1")
    gemm(tmp_path, [0.02], version="0.24.0")
    rows = read(tmp_path, "vllm")["gemm"]
    assert (rows.version, rows.seconds.tolist()) == ("0.24.0", [2e-5])


def test_a_kernel_with_a_host_floor_keeps_what_takes_longer(tmp_path: Path) -> None:
    floor = [0.082] * 40 + [0.1] * 5
    gemm(tmp_path, [*floor, 0.3, 0.0])
    rows = read(tmp_path, "vllm")["gemm"]
    assert rows.seconds.tolist() == [3e-4]
    assert (rows.excluded[FLOOR], rows.excluded[NOT_POSITIVE]) == (45, 1)
    big = gemm(tmp_path, [0.2] * 40)
    pq.write_table(pq.read_table(big).set_column(0, "m", pa.array([1e8] * 40)), big)
    assert len(read(tmp_path, "vllm")["gemm"].seconds) == 40, "long because it does much"
    gemm(tmp_path, [0.008] * 40 + [0.3])
    assert len(read(tmp_path, "vllm")["gemm"].seconds) == 41, "a launch of microseconds is the device's business"


def test_windows_and_eager_collectives_are_left_out(tmp_path: Path) -> None:
    table(
        tmp_path,
        "attention",
        "context_attention",
        batch_size=[1, 1],
        isl=[64, 64],
        num_heads=[8, 8],
        num_key_value_heads=[8, 8],
        head_dim=[128, 128],
        step=[0, 0],
        window_size=[0, 128],
        attn_dtype=["bfloat16"] * 2,
        kv_cache_dtype=["bfloat16"] * 2,
        latency=[0.1, 0.2],
    )
    table(
        tmp_path,
        "comm",
        "custom_allreduce",
        num_gpus=[2, 2],
        message_size=[64, 64],
        backend=["vllm_graph", "vllm_eager"],
        allreduce_dtype=["bfloat16"] * 2,
        latency=[0.1, 0.2],
    )
    found = read(tmp_path, "vllm")
    assert {name: rows.seconds.tolist() for name, rows in found.items()} == {
        "context_attention": [1e-4],
        "custom_allreduce": [1e-4],
    }
    assert found["context_attention"].excluded[WINDOWED] == 1
    assert found["custom_allreduce"].excluded[EAGER] == 1


def test_errors_of_tables_name_file_and_column(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="no operator table of backend 'vllm'; expected OPERATOR/BACKEND/VERSION"):
        read(tmp_path, "vllm")
    path = gemm(tmp_path, [1.0])
    with pytest.raises(ForgeError, match="no operator table of backend 'sglang'; it has vllm"):
        read(tmp_path, "sglang")
    pq.write_table(pa.table({"m": [1]}), path)
    with pytest.raises(ForgeError, match=r"gemm_perf.parquet: no column 'n'"):
        read(tmp_path, "vllm")
    path.write_text("no table")
    with pytest.raises(ForgeError, match=r"gemm_perf.parquet: not a readable Parquet file"):
        read(tmp_path, "vllm")


@needs_data
def test_the_fp8_block_floor_of_vllm_is_counted() -> None:
    """SOURCES.md: near 82 us, host overhead; SGLang's has none."""
    ours, theirs = (read(DATA / "h200_sxm", backend)["gemm"] for backend in ("vllm", "sglang"))
    assert ours.excluded[FLOOR] > 20_000
    block = ours.seconds[ours.columns["gemm_dtype"] == "fp8_block"]
    assert np.quantile(block, 0.01) > 82e-6
    assert theirs.excluded[FLOOR] == 0
