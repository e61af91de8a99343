"""Tuning in the background: the plan is known before, the result reads back, a stopped job goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dashboards import jobs
from dashboards.jobs import Ask, Job
from forge.runs import write_json
from forge.scenario import load, parse, read_toml
from forge.types import ForgeError

QUICKSTART = load("quickstart")
SMALL = load("quickstart", ["stop={items=12}", "queue={n=4,batch=2,concurrency=2,group=2}"])


@pytest.mark.parametrize("name", ["quickstart", "campaign_m25", "smollm2"])
def test_a_jobs_scenario_reads_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(jobs.scenario_toml(load(name)), encoding="utf-8")
    assert parse(read_toml(path), "job") == load(name)


def test_the_plan_says_how_much_it_is_at_most() -> None:
    space, most = jobs.plan(Ask(scenario=QUICKSTART, seeds=4))
    assert space.points is not None
    assert most == (len(space.points) + 1) * 2 + 2 * 2
    listed = Ask(scenario=QUICKSTART, params=("queue.n=24,32", "policy.scheduler.fraction=0.1,0.2,0.3"), seeds=4)
    assert jobs.plan(listed)[1] == (2 * 3 + 1) * 2 + 2 * 2
    endless = Ask(scenario=QUICKSTART, params=("policy.scheduler.fraction=0.1..0.9",), seeds=4, trials=7)
    assert jobs.plan(endless)[1] == (7 + 1) * 2 + 2 * 2


@pytest.mark.parametrize(
    ("param", "complaint"),
    [
        ("queue.nn=1,2", "--param: queue.nn: not a key that can be tuned"),
        ("nonsense", "--param nonsense: write key.path=values"),
        ("queue.n=9..2", "the range's lower end comes first"),
    ],
)
def test_a_wrong_key_starts_nothing(tmp_path: Path, param: str, complaint: str) -> None:
    with pytest.raises(ForgeError) as raised:
        jobs.start(Ask(scenario=QUICKSTART, params=(param,)), tmp_path)
    assert complaint in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def wait(job: Job, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while job.state() == "running" and time.monotonic() < deadline:
        time.sleep(0.2)


def test_a_job_ends_with_a_policy_and_one_killed_goes_on(tmp_path: Path) -> None:
    ask = Ask(scenario=SMALL, params=("policy.scheduler.fraction=0.25,0.5,1.0",), seeds=4, steps=0, workers=1)
    job = jobs.start(ask, tmp_path)
    while job.state() == "running" and not job.runs_made():
        time.sleep(0.05)
    jobs.stop(job)
    wait(job)
    assert job.state() == "stopped", jobs.log_tail(job)
    made = job.runs_made()
    assert made > 0
    jobs.go_on(job)
    wait(job)
    assert job.state() == "done", jobs.log_tail(job)
    assert made <= job.runs_made() <= jobs.plan(ask)[1] + 1
    assert jobs.jobs(tmp_path) == [job]
    load_back = load("quickstart", ["stop={items=12}", "queue={n=4,batch=2,concurrency=2,group=2}"], job.policy)
    assert load_back.policy.scheduler.kind == "windowed_fifo"
    result = job.result()
    assert result is not None
    standing = jobs.front(result).columns["what"]
    assert "chosen" in standing
    assert all(jobs.bounds(gain).startswith(("+", "-")) for _, _, _, gain in jobs.gains(result))


def test_what_the_command_complains_of_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path)
    (tmp_path / "scenario.toml").write_text(jobs.scenario_toml(SMALL), encoding="utf-8")
    write_json(tmp_path / "job.json", {"options": ["--param=queue.nn=1,2"]})
    jobs.go_on(job)
    wait(job)
    assert job.state() == "failed"
    assert job.complaint().startswith("--param: queue.nn: not a key that can be tuned")
