"""A real live run, small: the shipped model, real agents through the real gateway, a real trainer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forge import scenario as scenarios  # noqa: E402
from forge import trace as ev  # noqa: E402
from forge.metrics import summarise  # noqa: E402
from forge.pool.reader import PoolReader  # noqa: E402
from forge.replay import replay  # noqa: E402
from forge.runs import RunFolder  # noqa: E402
from forge.types import Completion, DeathReason, ItemState  # noqa: E402
from sim.world import simulate  # noqa: E402

SETTINGS = [
    "queue={n=6,batch=2,concurrency=4,group=4,item_timeout_s=30}",
    "eval.tasks=10",
    "engine.instances=2",
    "policy.router.kind=round_robin",
]

#: The engines without torch: what is tested is the run around them.
FAKE = ('engine={kind="fake",max_context=512}', "train.engine=fake", "eval.tasks=0")

pytestmark = pytest.mark.timeout(240)


def command(root: Path, *settings: str) -> list[str]:
    sets = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
    return [sys.executable, "-m", "forge", "run", "quickstart", "--runs", str(root), *sets]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("runs")
    done = subprocess.run(command(root, "stop={items=16}"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return RunFolder.open((root / "latest").resolve())


def test_the_folder_tells_all(folder: RunFolder) -> None:
    summary = folder.read("summary.json")
    assert summary is not None
    assert summary["world"] == "live"
    assert summary["law_violations"] == []
    assert summary["items_submitted"] == 16
    assert summary["samples_consumed"] > 0
    evaluation = folder.read("evaluation.json")
    assert evaluation is not None
    assert len(evaluation["start"]["scores"]) == len(evaluation["end"]["scores"]) == 10
    assert (folder.path / "report.html").stat().st_size > 10_000


def test_refused_requests_are_asked_again_and_nothing_dies_of_it_in_any_scaffold(tmp_path: Path) -> None:
    """Agents that find the engines full are answered with 429, wait, and come again, as often as
    it takes."""
    limit = 'policy.dispatch={kind="mix",refuse_above=1,retry_after_s=0.02}'
    named = ["plain/native/all/bare", "vote/hermes~bare/drop-1/terse"]
    settings = ("stop={items=8}", *FAKE, limit, f"agents.scaffolds={json.dumps(named)}")
    done = subprocess.run(command(tmp_path, *settings), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = RunFolder.open((tmp_path / "latest").resolve())
    summary = folder.read("summary.json") or {}
    assert summary["refused"] > 0
    assert sum(summary["dead"].values()) == 0
    assert summary["law_violations"] == []
    with PoolReader(folder.path / "pool.sqlite") as pool:
        drawn = [{one.outcome.scaffold for one in pool.trajectories(position)} for position in range(8)]
    assert all(len(of_item) == 1 for of_item in drawn)
    assert set().union(*drawn) == set(named)
    assert replay(folder).is_same


def test_who_overdraws_its_budget_dies_of_it_and_conversations_are_told(tmp_path: Path) -> None:
    """One call is enough for those that need no tool."""
    limits = ("eval.tasks=0", "train.engine=fake", "live.trajectory_calls=1", "live.request_log=true")
    done = subprocess.run(command(tmp_path, "stop={items=8}", *limits), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = RunFolder.open((tmp_path / "latest").resolve())
    summary = folder.read("summary.json") or {}
    reasons = Counter(e.reason for e in folder.events() if isinstance(e, ev.MemberDone))
    assert reasons["budget"] > 0
    assert reasons["environment"] == 0
    rows = [json.loads(line) for line in (folder.path / "requests.jsonl").read_text().splitlines()]
    assert Counter(row["code"] for row in rows)["budget_spent"] == reasons["budget"]
    assert summary["forks"]["root"] == sum(row["status"] == 200 for row in rows)
    assert replay(folder).is_same


def test_both_worlds_have_the_same_keys(folder: RunFolder) -> None:
    scenario = folder.scenario()
    simulated = summarise(simulate(scenario).events, scenario)
    assert set(simulated) == set(folder.read("summary.json") or {})


def test_every_item_ended_once_and_the_trace_replays(folder: RunFolder) -> None:
    with PoolReader(folder.path / "pool.sqlite") as pool:
        counts = pool.counts()
    assert counts[ItemState.PUBLISHED] + counts[ItemState.DEAD] == 16
    result = replay(folder)
    assert result.is_same, result.difference
    used = Counter(e.instance for e in folder.events() if isinstance(e, ev.Routed))
    assert set(used) == {0, 1}


def test_trajectories_are_shown(folder: RunFolder) -> None:
    def show(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "forge", "show", str(folder.path), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    listed = json.loads(show("--json", "--last", "3").stdout)
    assert {row["trajectory"].split(".")[0] for row in listed} == {"15", "14", "13"}
    assert len(listed) == 3 * 4
    longest = max(listed, key=lambda row: row["turns"])
    shown = show(longest["trajectory"], "--whole").stdout
    assert shown.count("sampled") == longest["turns"]
    assert shown.count("█") >= longest["turns"]
    assert "<|im_end|>" in shown
    (plain,) = json.loads(show(longest["trajectory"], "--json").stdout)
    assert [c["parent"] for c in plain["completions"]] == [None, *range(longest["turns"] - 1)]
    assert [c["fork"] for c in plain["completions"]] == ["root", *[None] * (longest["turns"] - 1)]
    tokens = show(longest["trajectory"], "--tokens").stdout
    assert f"{plain['completions'][0]['logprobs'][0]:8.3f}" in tokens
    for wrong, says in (("99.1", "there is no item 99"), ("x", "give POSITION or POSITION.MEMBER"), ("3.9", "no such")):
        refused = show(wrong)
        assert refused.returncode == 2
        assert says in refused.stderr


def test_recorded_logprobs_are_the_models_own(folder: RunFolder) -> None:
    """Through agents, HTTP, chat template and engine, what is recorded is what the first weights say of those ids."""
    from transformers import AutoModelForCausalLM

    from forge.models import resolve

    model = AutoModelForCausalLM.from_pretrained(resolve("quickstart"), local_files_only=True)
    with PoolReader(folder.path / "pool.sqlite") as pool:
        trajectories = [t for p in pool.positions(ItemState.PUBLISHED)[:4] for t in pool.trajectories(p)]
    first = [c for t in trajectories for c in t.completions if set(c.versions) == {0}]
    assert len(first) >= 8
    for completion in first[:24]:
        assert recomputed(model, completion) == pytest.approx(completion.logprobs, abs=1e-3)


def recomputed(model: object, completion: Completion) -> list[float]:
    ids = torch.tensor([[*completion.prompt_ids, *completion.sampled_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].float(), dim=-1)  # type: ignore[operator]
    start = len(completion.prompt_ids)
    return [float(logprobs[start + i - 1, token]) for i, token in enumerate(completion.sampled_ids)]


def test_the_checkpoint_is_a_model_folder(folder: RunFolder) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    newest = sorted((folder.path / "checkpoints").glob("step-*"))[-1]
    model = AutoModelForCausalLM.from_pretrained(newest, local_files_only=True)
    assert model.num_parameters() > 800_000
    assert AutoTokenizer.from_pretrained(newest, local_files_only=True).decode([5])


def test_ctrl_c_stops_cleanly_and_resume_goes_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, *FAKE, "stop={items=24}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    trace = tmp_path / "latest" / "trace.jsonl"
    for _ in range(1200):
        if trace.is_file() and '"e":"committed"' in trace.read_text():
            break
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "go on with: forge run --resume" in " ".join(output.split())
    stopped = RunFolder.open((tmp_path / "latest").resolve())
    last = list(stopped.events())[-1]
    assert isinstance(last, ev.RunEnded)
    assert last.reason == "stopped"
    resumed = subprocess.run(
        [sys.executable, "-m", "forge", "run", "--resume", str(stopped.path), "--json"], capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads(resumed.stdout.splitlines()[-1])
    assert summary["lives"] == 2
    assert summary["items_submitted"] == 24
    assert summary["law_violations"] == []
    assert replay(stopped).is_same


def test_stragglers_are_parked_and_killed_when_left_behind(tmp_path: Path) -> None:
    """Tools that wait up to a minute; the run need not wait for their agents once the head has moved on."""
    slow = 'domains=[{name="calc",tool_wait={median_s=0.2,sigma=3.0,cap_s=60.0}},{name="gcd",weight=3}]'
    queue = "queue={n=8,batch=2,concurrency=6,group=2,item_timeout_s=90}"
    escape = 'policy.scheduler={kind="windowed_fifo",fraction=0.3,park_items=3,park_after_s=1.0,park_reach=4}'
    done = subprocess.run(
        command(tmp_path, "eval.tasks=0", "train.engine=fake", "stop={items=24}", queue, slow, escape),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    folder = RunFolder.open((tmp_path / "latest").resolve())
    summary = folder.read("summary.json") or {}
    assert summary["law_violations"] == []
    assert summary["items_parked"] >= summary["dead"]["stale"] > 0
    assert summary["wall_s"] < 60.0
    assert replay(folder).is_same
    with PoolReader(folder.path / "pool.sqlite") as pool:
        stale = [p for p in pool.positions(ItemState.DEAD) if pool.item(p).death is DeathReason.STALE]
        reasons = {t.outcome.reason for p in stale for t in pool.trajectories(p)}
    assert DeathReason.STALE in reasons


def test_the_shipped_scenarios_load() -> None:
    for path in scenarios.scenarios_dir().glob("*.toml"):
        assert scenarios.load(path).name == path.stem
