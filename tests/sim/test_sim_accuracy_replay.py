"""Runs replayed by the simulator: conservation, preemption, order of service; recovery of what made a run; errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cost import CostModel, Deployment, Efficiencies, hardware, model_card
from forge.types import ForgeError
from sim.accuracy_replay import FOLDER, Request, Run, calibrate, load, replay, score
from sim.robust import robust_fit

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not (DATA / FOLDER).is_dir(), reason=f"{DATA / FOLDER}: absent")


def run_of(requests: list[tuple[float, int, int]], **engine: int | None) -> Run:
    on = Deployment(model=model_card("llama_3_1_8b"), hardware=hardware("rtx_4090"))
    settings = {"token_budget": 2048, "sequences": 128, "kv_tokens": 100_000} | engine
    made = tuple(Request(arrival_s=t, prompt=p, output=o, first_s=0.0, last_s=0.0) for t, p, o in requests)
    return Run(name="made", on=on, requests=made, **settings)  # type: ignore[arg-type]


def test_one_request_alone_by_hand() -> None:
    """Two chunks of prefill, the second of which samples the first token; then a decode a token."""
    run = run_of([(0.0, 3000, 5)])
    cost = CostModel(run.on)
    (one,) = replay(run, cost)
    first = cost.iteration(prefill=[(2048, 0)]) + cost.iteration(prefill=[(952, 2048)])
    assert one.first_s == pytest.approx(first)
    assert one.last_s == pytest.approx(first + cost.decode(1, 3000, 4))


def test_decodes_go_on_beside_a_prefill() -> None:
    run = run_of([(0.0, 100, 50), (0.1, 5000, 1)])
    alone = replay(run_of([(0.0, 100, 50)]), CostModel(run.on))[0]
    beside, late = replay(run, CostModel(run.on))
    assert beside.last_s > alone.last_s
    assert late.first_s == late.last_s > 0.1


@pytest.mark.parametrize("kv_tokens", [100_000, 4_000, 1_300])
def test_every_request_ends_once_whatever_the_memory(kv_tokens: int) -> None:
    run = run_of([(0.01 * i, 300 + 40 * (i % 7), 100 + 30 * (i % 11)) for i in range(60)], kv_tokens=kv_tokens)
    served = replay(run, CostModel(run.on))
    assert all(one.arrival_s < one.first_s < one.last_s for one in served)
    firsts = [one.first_s for one in served]
    assert firsts == sorted(firsts), "first come, first served"


def test_less_memory_is_never_faster() -> None:
    ends = []
    for kv_tokens in (1_300, 4_000, 100_000):
        run = run_of([(0.0, 400, 200)] * 40, kv_tokens=kv_tokens)
        ends.append(max(one.last_s for one in replay(run, CostModel(run.on))))
    assert ends[0] > ends[1] > ends[2]


def test_a_request_beyond_the_memory_is_refused() -> None:
    run = run_of([(0.0, 400, 200)], kv_tokens=500)
    with pytest.raises(ForgeError, match=r"400 \+ 200 tokens take 38 KV blocks, more than the 31 of an instance"):
        replay(run, CostModel(run.on))


def test_calibration_finds_what_made_the_run() -> None:
    run = run_of([(0.05 * i, 200 + 300 * (i % 5), 50 + 20 * (i % 4)) for i in range(40)])
    truth = CostModel(run.on, replace(Efficiencies(), bandwidth=0.6, flops=0.5, step_s=2e-3))
    run = replace(run, requests=tuple(replay(run, truth)))
    found = score(run)
    assert abs(found["untuned_tpot_error"]) > 0.05
    assert all(abs(found[f"{metric}_error"]) < 0.02 for metric in ("ttft", "tpot", "e2e"))
    assert calibrate(run).by.bandwidth == pytest.approx(0.6, rel=0.2)


def test_robust_fit_shrugs_off_an_outlier() -> None:
    import numpy as np

    x, y = np.linspace(0.0, 1.0, 21), np.linspace(0.0, 2.0, 21)
    y[3] = 50.0
    (slope,) = robust_fit(lambda b: (b[0] * x - y) / 0.1, lambda _: x[:, None] / 0.1, np.array([10.0]))
    assert slope == pytest.approx(2.0, abs=0.05)


@needs_data
def test_the_runs_load() -> None:
    small, large = load(DATA)
    assert (small.on.hardware.name, small.kv_tokens, len(small.requests)) == ("RTX 4090", 41_408, 300)
    assert (large.on.hardware.name, large.sequences, len(large.requests)) == ("RTX PRO 6000", 128, 300)


def test_loader_errors(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="no run in it"):
        load(tmp_path)
    folder = tmp_path / FOLDER / "RTX4090_x"
    folder.mkdir(parents=True)
    (folder / "requests.jsonl").write_text('{"queued_ts": 1.0}\n', encoding="utf-8")
    with pytest.raises(ForgeError, match="RTX4090_x: not a measured run: FileNotFoundError"):
        load(tmp_path)
    (folder / "meta.json").write_text(json.dumps({"engine_kwargs": {}}), encoding="utf-8")
    with pytest.raises(ForgeError, match="RTX4090_x: not a measured run: KeyError: 'input_toks'"):
        load(tmp_path)
