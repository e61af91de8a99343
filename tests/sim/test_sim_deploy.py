"""From a scenario to instances: what a calibration file says reaches the iterations, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_scenarios import agents

from forge.types import ForgeError
from sim.clock import to_fs
from sim.deploy import plans

TWICE = '[deployments."here".factors]\ndecode = 2.0\nprefill = 1.0\n'


def test_a_calibration_reaches_the_iterations(tmp_path: Path) -> None:
    file = tmp_path / "calibration.toml"
    file.write_text(TWICE)
    plain, calibrated = (plans(agents(deployment=of))[0][0] for of in ({}, {"calibration": str(file)}))
    (a, b, _), (twice_a, twice_b, _) = plain.line(8), calibrated.line(8)
    assert twice_a == pytest.approx(2 * a, rel=1e-9)
    assert twice_b == pytest.approx(2 * b, rel=1e-9)


def test_a_deployment_the_file_does_not_have_is_named(tmp_path: Path) -> None:
    file = tmp_path / "calibration.toml"
    file.write_text(TWICE)
    with pytest.raises(ForgeError, match="elsewhere: no such deployment; it has here"):
        plans(agents(deployment={"calibration": str(file), "calibrated": "elsewhere"}))
    with pytest.raises(ForgeError, match="not a readable TOML file"):
        plans(agents(deployment={"calibration": str(tmp_path / "absent.toml")}))


def test_a_model_that_does_not_fit_says_how_much_room_there_is() -> None:
    with pytest.raises(ForgeError, match=r"sim.deployment: .* leaves room for 0 tokens of KV"):
        plans(agents(deployment={"model": "llama_3_1_405b", "kv_tokens": None}))


def test_faults_name_the_keys_to_change() -> None:
    with pytest.raises(ForgeError, match=r"sim\.deployment\.budget = 8: must exceed engine\.slots = 64"):
        plans(agents(deployment={"budget": 8}, engine={"slots": 64}))
    with pytest.raises(ForgeError, match=r"sim\.deployment\.kv_tokens = 1000: less than engine\.max_context"):
        plans(agents(deployment={"kv_tokens": 1000}))


def test_times_that_cannot_be_simulated_are_refused() -> None:
    for seconds in (1e300, float("inf"), float("nan")):
        with pytest.raises(ForgeError, match="no time that can be simulated"):
            to_fs(seconds)
