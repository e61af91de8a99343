"""Round trip: calibrating on a simulated trace finds what it was simulated with, and reproduces its figures."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from agent_scenarios import agents
from sim_scenarios import build, heavy_tail

from forge import trace as ev
from forge.scenario import Scenario
from forge.sections import Stop, ToolWait
from forge.sections_agents import AgentDomain
from forge.sections_sim import Sim
from forge.types import ForgeError
from sim.calibrate import Calibration, calibrate, mean_wait, to_toml
from sim.fit import fit_line, log_normal, shared_variance, usage_rows
from sim.predict import predict
from sim.world import simulate

#: Another machine and other work than the defaults, which is what calibration starts from.
TRUTH = {
    "step_s": 5e-3,
    "row_s": 2e-4,
    "prefill_token_s": 3e-5,
    "cached_share": 0.2,
    "request_cpu_s": 4e-3,
    "request_latency_s": 3e-3,
    "data_s": 0.01,
    "train_step_s": 0.3,
    "train_token_s": 2e-4,
    "save_s": 0.07,
    "load_s": 0.03,
    "domains": {
        "agent": {
            "turns": [0.1, 0.5, 0.4],
            "tokens_median": 14,
            "tokens_sigma": 0.6,
            "death_rate": 0.05,
            "reward": 0.6,
        },
        "reasoning": {"turns": [1.0], "tokens_median": 30, "tokens_sigma": 0.9, "tokens_cap": 200, "item_share": 0.6},
    },
}


def truth() -> Scenario:
    queue = {"n": 32, "batch": 8, "concurrency": 24, "group": 8}
    wait = {"median_s": 0.3, "sigma": 1.0, "cap_s": 10.0}
    return build(queue, tool_wait=wait, sim=TRUTH, engine={"slots": 48}, items=120)


@pytest.fixture(scope="module")
def calibrated() -> Calibration:
    """Fitted without knowing: the scenario given has the default `sim` section."""
    scenario = truth()
    events = simulate(scenario).events
    return calibrate(events, scenario.model_copy(update={"sim": Sim()}), source="runs/x")


def test_machine_parameters_are_found(calibrated: Calibration) -> None:
    for key in ("step_s", "row_s", "prefill_token_s", "data_s", "train_step_s", "train_token_s", "save_s", "load_s"):
        assert getattr(calibrated.sim, key) == pytest.approx(TRUTH[key], rel=1e-6), key
    assert calibrated.sim.cached_share == pytest.approx(0.2, abs=0.01)
    assert calibrated.sim.request_cpu_s == pytest.approx(4e-3, rel=0.05)
    assert calibrated.sim.request_latency_s == pytest.approx(3e-3, rel=0.1)
    assert calibrated.sim.instance_mtbf_s is None
    assert calibrated.sim.calibrated_from == "runs/x"


def test_workload_parameters_are_found(calibrated: Calibration) -> None:
    """To the sampling error of 120 items."""
    agent, reasoning = calibrated.sim.domains["agent"], calibrated.sim.domains["reasoning"]
    assert agent.turns == pytest.approx((0.1, 0.5, 0.4), abs=0.06)
    assert (agent.prompt_tokens, agent.turn_tokens) == (48, 16)
    assert agent.tokens_median == pytest.approx(14, rel=0.1)
    assert agent.tokens_sigma == pytest.approx(0.6, rel=0.1)
    assert agent.death_rate == pytest.approx(0.05, abs=0.02)
    assert agent.reward == pytest.approx(0.6, abs=0.07)
    assert agent.item_share == pytest.approx(0.3, abs=0.1)
    assert reasoning.turns == (1.0,)
    assert reasoning.tokens_median == pytest.approx(30, rel=0.25)  # 40 items, most of whose spread is shared
    assert reasoning.tokens_sigma == pytest.approx(0.9, rel=0.1)
    assert reasoning.item_share == pytest.approx(0.6, abs=0.1)


def test_the_calibrated_section_reproduces_the_run(calibrated: Calibration) -> None:
    quality = calibrated.quality
    for key in ("trained_tokens_per_s", "items_per_s", "lag_items_mean"):
        assert quality[f"simulated.{key}"] == pytest.approx(quality[f"measured.{key}"], rel=0.07), key
    for key in ("engine_idle_fraction", "trainer_idle_fraction"):
        assert quality[f"simulated.{key}"] == pytest.approx(quality[f"measured.{key}"], abs=0.05), key
    assert quality["measured.tool_wait_s.agent"] == pytest.approx(quality["declared.tool_wait_s.agent"], rel=0.1)


def test_the_toml_is_a_sim_section(calibrated: Calibration) -> None:
    text = to_toml(calibrated)
    assert text.startswith("# engine.r2 = 1\n")
    assert Sim.model_validate(tomllib.loads(text)["sim"]) == calibrated.sim


def test_failures_are_found() -> None:
    sim = {"instance_mtbf_s": 2.0, "instance_repair_s": 0.5}
    scenario = build({"n": 16, "batch": 4, "concurrency": 16, "group": 2}, sim=sim, engine={"instances": 4}, items=150)
    found = calibrate(simulate(scenario).events, scenario).sim
    assert found.instance_mtbf_s == pytest.approx(2.0, rel=0.35)
    assert found.instance_repair_s == pytest.approx(0.5, rel=1e-6)


def test_a_short_probe_is_compared_with_as_short_a_simulation() -> None:
    scenario = build({"n": 8, "batch": 4, "concurrency": 8, "group": 2})
    probe = simulate(scenario.model_copy(update={"stop": Stop(seconds=3.0)})).events
    long = scenario.model_copy(update={"stop": Stop(seconds=300.0)})
    assert calibrate(probe, long).quality == calibrate(probe, scenario).quality


def usage(t: float, busy_s: float, prefill: int) -> ev.Usage:
    return ev.Usage(t=t, busy_s=(busy_s,), steps=(int(busy_s * 100),), prefill_tokens=(prefill,), decode_tokens=(5,))


def test_what_an_engine_did_before_the_first_item_is_not_the_runs() -> None:
    item = ev.Submitted(t=0.0, position=0, domain="agent", difficulty=1.0, members=1)
    rows = usage_rows([usage(0.0, 9.0, 9000), item, usage(1.0, 9.5, 9100), usage(2.0, 10.0, 9150)])
    assert rows[:, 3].tolist() == [100.0, 50.0]
    again = ev.Resumed(t=2.0, life=1, queue={}, items={}, step=0, version=0, published_step=0)
    assert usage_rows([item, again, usage(3.0, 0.5, 70)])[:, 3].tolist() == [70.0]


def test_events_whose_submission_is_lost_are_left_out() -> None:
    scenario = build({"n": 8, "batch": 4, "concurrency": 8, "group": 2})
    events = [e for e in simulate(scenario).events if not (isinstance(e, ev.Submitted) and e.position == 3)]
    assert calibrate(events, scenario).sim.domains["agent"].tokens_median > 0


def test_of_a_simulated_deployment_only_what_it_uses_is_fitted() -> None:
    """Its instances are timed by the cost model, its work is of synthetic agents: fits of both would change nothing."""
    scenario = agents(items=24, sim={"request_cpu_s": 4e-3})
    events = simulate(scenario).events
    found = calibrate(
        events, scenario.model_copy(update={"sim": scenario.sim.model_copy(update={"train_step_s": 9.0})})
    )
    for key in ("step_s", "row_s", "prefill_token_s", "cached_share", "domains", "agents", "deployment"):
        assert getattr(found.sim, key) == getattr(scenario.sim, key), key
    assert found.sim.train_step_s == pytest.approx(2.0)
    assert "engine.r2" not in found.quality
    assert [note.split(" not fitted")[0] for note in found.notes] == [
        "step_s, row_s, prefill_token_s and cached_share are",
        "sim.domains are",
    ]
    assert all(f"# {note}\n" in to_toml(found) for note in found.notes)


def test_of_a_live_run_nothing_is_kept_that_it_did_not_have() -> None:
    plain = build({"n": 8, "batch": 4, "concurrency": 8, "group": 2})
    events = simulate(plain).events
    live = [replace(e, world="live") if isinstance(e, ev.RunStarted) else e for e in events]
    planned = agents().sim
    scenario = plain.model_copy(update={"sim": planned.model_copy(update={"agents": {"agent": AgentDomain()}})})
    found = calibrate(live, scenario)
    assert (found.sim.deployment, found.sim.agents, found.notes) == (None, {}, ())
    assert found.sim.step_s == pytest.approx(plain.sim.step_s)
    assert set(found.sim.domains) == {"agent", "reasoning"}


def test_figures_of_a_short_run_come_with_the_spread_of_seeds() -> None:
    """Few items of a heavy tail: other seeds of the very same scenario are far from it too."""
    scenario = agents(items=12)
    quality = calibrate(simulate(scenario).events, scenario).quality
    for key in ("trained_tokens_per_s", "items_per_s"):
        low, high = (quality[f"simulated.{key}.{end}"] for end in ("low", "high"))
        assert low <= quality[f"simulated.{key}"] <= high
        assert low <= quality[f"measured.{key}"] <= high, key
        assert high - low > 0.2 * quality[f"simulated.{key}"], key


def test_user_errors() -> None:
    start = ev.RunStarted(t=0.0, schema=ev.SCHEMA, world="live", scenario="x", seed=0)
    with pytest.raises(ForgeError, match="nothing to calibrate on"):
        calibrate([start], heavy_tail())


def test_a_line_never_has_negative_coefficients() -> None:
    x = np.arange(1.0, 9.0)
    line = fit_line(np.stack([np.ones(8), x, x**2], axis=1), 5.0 + 2.0 * x - 0.01 * x**2)
    assert min(line.coefficients) >= 0.0
    assert line.coefficients[2] == 0.0
    assert line.error < 0.01


def test_log_normal_keeps_the_mean() -> None:
    values = [1, 1, 1, 2, 3, 50]
    median, sigma = log_normal(values)
    assert median * np.exp(sigma**2 / 2) == pytest.approx(np.mean(values))


def test_shared_variance() -> None:
    assert shared_variance([[1.0, 1.0], [2.0, 2.0], [5.0, 5.0]]) == 1.0
    assert shared_variance([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]) == 0.0
    assert shared_variance([[1.0], [2.0]]) == 0.0


def test_mean_wait_knows_the_cap() -> None:
    free = mean_wait(ToolWait(median_s=1.0, sigma=1.0, cap_s=1e9))
    assert free == pytest.approx(np.exp(0.5), rel=0.02)
    assert mean_wait(ToolWait(median_s=1.0, sigma=1.0, cap_s=1.0)) < 1.0


def test_prediction_gives_every_figure_an_interval() -> None:
    said = predict(heavy_tail(items=30), range(3))
    assert said["seeds"] == [0, 1, 2]
    rate = said["figures"]["trained_tokens_per_s"]
    assert rate["low"] < rate["mean"] < rate["high"]
    assert said == predict(heavy_tail(items=30), range(3))
