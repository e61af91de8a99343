"""The compiled core gives what its sources give, to the last digit; skipped where it is not built (`make fast`)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest
from agent_scenarios import agents
from sim_scenarios import build

from forge import compiled
from forge import trace as ev
from forge.scenario import Scenario
from forge.types import ForgeError
from sim import plan
from sim.world import simulate

SCENARIOS = {
    "lines": lambda: build(
        {"n": 16, "batch": 4, "concurrency": 12, "group": 4, "item_timeout_s": 8.0},
        tool_wait={"median_s": 0.5, "sigma": 1.5, "cap_s": 30.0},
        sim={"instance_mtbf_s": 5.0, "instance_repair_s": 1.0, "domains": {"agent": {"death_rate": 0.1}}},
        engine={"instances": 2},
    ),
    "agents": agents,
}


def digest(scenario: Scenario) -> str:
    return sha256("\n".join(map(ev.encode, simulate(scenario).events)).encode()).hexdigest()


@pytest.mark.parametrize("name", SCENARIOS)
def test_compiled_and_interpreted_runs_are_the_same(name: str) -> None:
    if not compiled.in_use():
        pytest.skip("no compiled core of these sources: make fast")
    env = os.environ | {compiled.PURE: "1"}
    done = subprocess.run([sys.executable, __file__, name], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["interpreted", digest(SCENARIOS[name]())]


def test_a_changed_source_is_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled.folder()
    edited = tmp_path / "plan.py"
    edited.write_text(compiled.sources()[0].read_text() + "\n")
    monkeypatch.setattr(compiled, "sources", lambda: [edited])
    assert compiled.folder() != before


def test_workers_find_it_as_their_parent_did() -> None:
    """A pool that spawns hands its children the parent's `sys.path`, before they import anything."""
    code = "import forge, multiprocessing as m\nif __name__ == '__main__':\n"
    code += "    with m.get_context('spawn').Pool(1) as pool:\n        print(pool.apply(where))"
    script = f"def where():\n    import sim.plan\n    return sim.plan.__file__\n{code}\n"
    with tempfile.TemporaryDirectory() as away:
        path = Path(away) / "pool.py"
        path.write_text(script)
        done = subprocess.run([sys.executable, path], cwd=away, capture_output=True, text=True, check=True, timeout=60)
    assert Path(done.stdout.strip()) == Path(str(plan.__file__))


def test_a_source_edited_meanwhile_is_not_taken_for_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = iter([Path("/nowhere/before"), Path("/nowhere/after")])
    monkeypatch.setattr(compiled, "folder", lambda: next(folders))
    monkeypatch.setattr("mypyc.build.mypycify", lambda *_, **__: [])
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    with pytest.raises(ForgeError, match="edited while it was compiled"):
        compiled.build()


def test_every_module_is_there() -> None:
    assert [path for path in compiled.sources() if not path.is_file()] == []


if __name__ == "__main__":
    print("compiled" if compiled.in_use() else "interpreted", digest(SCENARIOS[sys.argv[1]]()))
