"""Every page runs in Streamlit's own test harness, without a browser: what a control changes, what an error says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import worlds

from forge import trace as ev
from forge.runs import RunFolder
from forge.scenario import load
from sim.world import simulate

testing = pytest.importorskip(
    "streamlit.testing.v1", reason="the pages need the dash extra: pip install 'forge-rl[dash]'"
)

SMALL = load("quickstart", ["stop={items=24}", "queue={n=8,batch=4,concurrency=6,group=4}"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run, one of another world that was killed within a line, and one that never began."""
    root = tmp_path_factory.mktemp("runs")
    simulated = RunFolder.create(root, SMALL, ["forge"])
    writer = ev.TraceWriter(simulated.trace)
    simulate(SMALL, (writer,))
    writer.close()
    simulated.path.rename(root / "1-simulated")
    killed = RunFolder.create(root, worlds.scenario(), ["forge"])
    writer = ev.TraceWriter(killed.trace)
    worlds.World(worlds.scenario(), sinks=(writer,)).run()
    writer.close()
    whole = killed.trace.read_bytes()
    killed.trace.write_bytes(whole[: int(0.7 * len(whole))])
    killed.path.rename(root / "2-killed")
    RunFolder.create(root, SMALL, ["forge"]).path.rename(root / "3-never-began")
    return root


@pytest.fixture(autouse=True)
def told_where_runs_are(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_RUNS", str(runs))


def page(name: str, **state: Any) -> Any:
    app = testing.AppTest.from_string(f"from dashboards import page_{name}\npage_{name}.page()", default_timeout=60)
    for key, value in state.items():
        app.session_state[key] = value
    return app.run()


def fine(app: Any) -> Any:
    assert not app.exception, app.exception
    assert not app.error, [one.value for one in app.error]
    return app


def test_the_app_is_a_page_with_the_others_beside_it() -> None:
    app = fine(testing.AppTest.from_file("../../dashboards/app.py", default_timeout=60).run())
    assert app.header[0].value == "What-if"


def table(app: Any) -> str:
    return next(one.value for one in app.markdown if "table class" in one.value)


def captions(app: Any) -> str:
    return " ".join(one.value for one in app.caption)


def test_what_if_compares_two_schedulers_at_once() -> None:
    app = fine(page("whatif", items=40))
    assert app.header[0].value == "What-if"
    assert captions(app).startswith("Look at ")
    assert "policy B against policy A" in table(app)
    assert "Simulated are the first 40 items; the scenario itself goes on to 300 seconds." in app.info[0].value
    assert "Look for orange" in captions(app)


def test_a_control_changes_the_result() -> None:
    app = fine(page("whatif", items=40))
    before = table(app)
    app.selectbox(key="B:quickstart:policy.scheduler.kind").set_value("windowed_fifo").run()
    same = table(fine(app))
    assert same != before
    assert "better" not in same, "the same policy on the same work"
    app.number_input(key="B:quickstart:queue.concurrency").set_value(8).run()
    assert "worse" in table(fine(app))


def test_a_policy_that_cannot_be_leaves_the_other_standing() -> None:
    app = page("whatif", items=40)
    app.number_input(key="A:quickstart:queue.n").set_value(4).run()
    assert not app.exception
    assert len(app.error) == 1
    assert "must not exceed n = 4" in app.error[0].value
    assert "policy B" in table(app)


def test_the_fleet_of_accelerators_can_be_changed() -> None:
    app = fine(page("whatif", items=2, scenario="campaign_m25"))
    app.number_input(key="A:campaign_m25:sim.deployment.prefill.instances").set_value(8).run()
    fine(app)
    assert "Prompt tokens found cached" in table(app)


@pytest.mark.parametrize("name", ["1-simulated", "2-killed"])
def test_a_run_is_shown_whatever_became_of_it(name: str) -> None:
    app = fine(page("run", run=name))
    assert "Non-stationarity" in table(app)
    assert any(name in one.value for one in app.markdown)


def test_two_runs_stand_side_by_side() -> None:
    app = fine(page("run", run="1-simulated", second="2-killed"))
    assert "run B against run A" in table(app)


def test_a_run_that_never_began_is_a_sentence() -> None:
    app = page("run", run="3-never-began")
    assert not app.exception
    assert "stopped before its first event" in app.error[0].value


def test_a_run_folder_is_served_by_two_routers() -> None:
    app = fine(page("trace", workload="a run folder", **{"workload-run": "1-simulated"}))
    assert "B: cache_aware against A: least_loaded" in table(app)
    app.selectbox(key="B:router").set_value("round_robin").run()
    assert "B: round_robin" in table(fine(app))
    app.number_input(key="requests").set_value(10).run()
    assert "Served are the first 10 of" in fine(app).info[0].value


def test_a_path_that_is_no_trace_is_a_sentence(tmp_path: Path) -> None:
    app = page("trace", workload="a path on this machine", **{"workload-path": str(tmp_path / "nowhere")})
    assert "no such file or folder" in app.error[0].value
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"\xff\xd8\xff\xe0 not a trace")
    app.text_input(key="workload-path").set_value(str(path)).run()
    assert not app.exception
    assert len(app.error) == 1


def test_tuning_says_how_much_it_would_be_and_refuses_wrong_keys() -> None:
    app = fine(page("tune"))
    assert app.button(key="start").label.startswith("Tune quickstart: at most ")
    app.text_area(key="params").set_value("queue.nn=1,2").run()
    assert not app.exception
    assert "not a key that can be tuned" in app.error[0].value


def test_no_runs_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_RUNS", str(tmp_path))
    assert "forge sim quickstart" in fine(page("run")).info[0].value
