"""verl's fully asynchronous loop: worked by hand, its quota, what is fitted on what, and the published table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forge.cost import CostModel, Deployment, hardware, model_card
from forge.types import ForgeError
from sim import staleness_fit
from sim.staleness import (
    PROMPT_TOKENS,
    PROMPTS_A_SERVER,
    Engines,
    Lengths,
    Loop,
    Step,
    _Rollouter,
    asynchronous,
    synchronous,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(
    not (DATA / staleness_fit.TABLE).exists(), reason=f"{DATA / staleness_fit.TABLE}: absent"
)
COST = CostModel(Deployment(model=model_card("qwen2_5_7b"), hardware=hardware("h20"), tp=4))
LENGTHS = Lengths(median=900.0, tail=0.03)


def loop(staleness: float, update_s: float = 40.0) -> Loop:
    return Loop(staleness=staleness, update_s=update_s, other_s=2.0, mini=4, require=4, samples=4)


def test_two_responses_by_hand() -> None:
    """The engine's line integrated over each span; a second, slower server does not hasten what one holds alone."""
    rollouter = _Rollouter(Engines(cost=COST, servers=1))
    rollouter.submit(np.array([10.0, 30.0]))
    assert rollouter.advance()
    first_s = rollouter.now
    a, b = COST.line(2)
    assert first_s == pytest.approx(10 * (a + b * 2 * PROMPT_TOKENS))
    assert rollouter.done == 0
    assert rollouter.advance()
    a, b = COST.line(1)
    assert rollouter.now - first_s == pytest.approx(20 * (a + b * (PROMPT_TOKENS + 10)))
    assert (rollouter.done, rollouter.left) == (1, {})


def test_an_interruption_costs_the_prefixes() -> None:
    rollouter = _Rollouter(Engines(cost=COST, servers=2, slow=3.0, budget=1000))
    rollouter.submit(np.array([2000.0, 3000.0]))
    rollouter.advance(rollouter.now + 1.0)
    sampled = int(rollouter.clock)
    stall_s = rollouter.interrupt()
    one = COST.prefill(PROMPT_TOKENS + sampled)
    both = COST.iteration(prefill=[(PROMPT_TOKENS + sampled, 0)] * 2)
    assert stall_s == pytest.approx(3.0 * (2 * one if 2 * (PROMPT_TOKENS + sampled) > 1000 else both) / 2)
    rollouter.advance(rollouter.now + stall_s)
    assert rollouter.clock == pytest.approx(sampled, abs=1), "nobody samples meanwhile"
    assert _Rollouter(Engines(cost=COST, servers=2)).interrupt() == 0.0


def test_the_trainer_bounds_a_step_and_the_quota_what_is_ahead() -> None:
    """Engines that are fast enough leave the trainer only its first wait; slow ones are waited for."""
    engines = Engines(cost=COST, servers=2)
    fast = asynchronous(loop(0.5), replace(engines, slow=1e-3), LENGTHS)
    assert fast.step_s == pytest.approx(42.0, rel=1e-3)
    assert fast.interrupted == pytest.approx(0.0)
    slow = asynchronous(loop(0.5), replace(engines, slow=3.0), LENGTHS)
    assert slow.step_s > 60.0
    assert slow.gen_s == pytest.approx(slow.step_s - 42.0)
    for staleness in (0.1, 0.5, 1.0):
        one = asynchronous(loop(staleness), replace(engines, slow=3.0), LENGTHS)
        assert 0 < one.interrupted <= min(loop(staleness).quota - 64, 2 * PROMPTS_A_SERVER)


def test_without_staleness_everything_is_on_policy() -> None:
    one = asynchronous(loop(0.0), Engines(cost=COST, servers=2), LENGTHS)
    assert (one.interrupted, one.stall_s) == (0.0, 0.0)
    alone = asynchronous(loop(0.0, update_s=0.0), Engines(cost=COST, servers=2), LENGTHS)
    assert alone.gen_s < one.gen_s + 40.0, "updates overlap with generation, all but the last"
    assert one.step_s < alone.step_s + 40.0


def test_staleness_pays_until_the_trainer_is_the_bound() -> None:
    engines = Engines(cost=COST, servers=2, slow=2.0)
    steps = [asynchronous(loop(s), engines, LENGTHS).step_s for s in (0.0, 0.25, 0.5, 1.0)]
    assert steps[0] > 1.1 * steps[1] > 1.1 * 0.95 * steps[2]
    assert all(step >= 42.0 for step in steps)


def test_lengths_have_a_body_a_tail_and_a_cap() -> None:
    drawn = LENGTHS.draw(np.random.default_rng(0), 4000, 4)
    assert np.median(drawn) == pytest.approx(900, rel=0.08)
    assert drawn.max() <= LENGTHS.cap
    bare = replace(LENGTHS, tail=0.0).draw(np.random.default_rng(0), 4000, 4)
    assert np.mean(drawn > 10_000) > 3 * np.mean(bare > 10_000)
    logs = np.log(bare)
    assert np.cov(logs[:, 0], logs[:, 1])[0, 1] / logs.var() == pytest.approx(0.5, abs=0.06)


def test_more_devices_are_bounded_by_the_longest() -> None:
    few, many = (synchronous(Engines(cost=COST, servers=n), LENGTHS, 32, 4) for n in (1, 8))
    longest = LENGTHS.draw(np.random.default_rng(0), 32, 4).max()
    assert few > many > longest * COST.line(1)[0]


HEADER = "mode,gpus,staleness_threshold,partial_rollout,step_s,gen_s,old_log_prob_s,update_actor_s\n"
ROWS = {
    s: f"fully_async,64:64,{s},1,{step},{step - 100},,96\n" for s, step in ((0, 230), (0.1, 170), (0.3, 1), (0.5, 1))
}
COLOCATED = "colocate_sync,128,,,350,170,50,110\n"


def write(folder: Path, *rows: str) -> Path:
    path = folder / staleness_fit.TABLE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# note\n" + HEADER + "".join(rows), encoding="utf-8")
    return folder


def test_the_rows_to_predict_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float | None, float]] = []

    def predict(rollout: staleness_fit.Rollout, staleness: float, like: staleness_fit.Row) -> Step:
        asked.append((staleness, like.step_s))
        return Step(step_s=200.0 * rollout.slow, gen_s=rollout.slow, interrupted=0, stall_s=0)

    monkeypatch.setattr(staleness_fit, "predict", predict)
    monkeypatch.setattr(staleness_fit, "synchronous", lambda engines, *_: 170.0 * engines.slow)
    rows = staleness_fit.load(write(tmp_path, COLOCATED, *ROWS.values()))
    told = staleness_fit.score(rows)
    assert {step for _, step in asked} == {230.0, 170.0}
    assert [one["fitted"] for one in told["rows"]] == [True, True, False, False]
    assert 0.9 < told["rollout"]["slow"] < 1.15
    assert told["error_max"] > 100, "the rows to predict are a second long"
    assert told["upturn"] == {"predicted": 0.0, "measured": 0.0}


def test_a_broken_table_names_file_and_row(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"verl_fully_async.csv: cannot be read"):
        staleness_fit.load(tmp_path)
    with pytest.raises(ForgeError, match=r"csv: row 2: not a row"):
        staleness_fit.load(write(tmp_path, COLOCATED, ROWS[0].replace("230", "soon")))
    with pytest.raises(ForgeError, match="needs synchronous rows and 64:64"):
        staleness_fit.load(write(tmp_path, *ROWS.values()))
    with pytest.raises(ForgeError, match="needs synchronous rows and 64:64"):
        staleness_fit.load(write(tmp_path, COLOCATED, ROWS[0]))


@needs_data
@pytest.mark.slow
def test_the_published_table() -> None:
    """Within 10% where it was not fitted. The rise from 0.3 to 0.5 is not there to be learnt: see the module."""
    told = staleness_fit.score(staleness_fit.load(DATA))
    assert told["error_max"] <= 0.10
    assert all(abs(one["error"]) <= 0.10 for one in told["rows"])
    assert told["upturn"]["measured"] > 0 > told["upturn"]["predicted"]
