"""The page of one trajectory: whom it lists, its tree in order, its times, tokens that are only ever text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.conversations import (
    DECODE,
    FORKED,
    PREFILL,
    WAITS,
    in_order,
    label,
    matches,
    prompt_html,
    sampled_html,
    time_line,
    title,
)
from forge import trace as ev
from forge.pool.store import Pool
from forge.report import trajectories
from forge.runs import RunFolder
from forge.scenario import load
from forge.types import Completion, DeathReason, ForgeError, Outcome, Trajectory

testing = pytest.importorskip(
    "streamlit.testing.v1", reason="the pages need the dash extra: pip install 'forge-rl[dash]'"
)


def completion(index: int, **over: Any) -> Completion:
    values: dict[str, Any] = {
        "trajectory": "0.0.0",
        "index": index,
        "prompt_ids": (1, 2),
        "sampled_ids": (3, 4),
        "logprobs": (-0.1, -3.0),
        "versions": (5, 6),
        "finish": "stop",
        "temperature": 1.0,
        "received_s": 10.0 + index,
        "first_token_s": 10.25 + index,
        "finished_s": 10.5 + index,
        "instance": 0,
    }
    return Completion(**(values | over))


def forked(member: int = 0, **outcome: Any) -> Trajectory:
    """A turn, two that go on from it, and a sub-agent's."""
    turns = (
        completion(0, fork="root"),
        completion(1, prompt_ids=(1, 2, 3, 4, 9), parent=0),
        completion(2, prompt_ids=(1, 2, 3, 4, 8), parent=0, fork="branch"),
        completion(3, prompt_ids=(1, 2, 3, 4, 9, 3, 4, 7), parent=1),
        completion(4, prompt_ids=(7,), fork="sub_agent"),
    )
    ended = Outcome(trajectory=f"0.{member}.0", **({"reward": 1.0} | outcome))
    return Trajectory(id=f"0.{member}.0", position=0, member=member, completions=turns, outcome=ended)


def texts(ids: Any) -> str:
    return "".join(chr(ord("a") + one) for one in ids)


def test_branches_stand_below_their_fork_and_one_level_deeper() -> None:
    shown = in_order(forked())
    assert [(one.turn.completion.index, one.depth) for one in shown] == [(0, 0), (1, 1), (3, 1), (2, 1), (4, 0)]
    assert title(shown[0]) == "#0 [root]: 2 new prompt tokens of 2, 2 sampled, stop"
    assert title(shown[3]) == "↳ #2 [branch]: 1 new prompt tokens of 5, 2 sampled, stop"


def test_time_between_a_turn_and_the_next_is_the_agents() -> None:
    columns = time_line(in_order(forked())).columns
    bars = list(zip(columns["turn"], columns["part"], columns["start"], columns["end"], strict=True))
    assert bars[:2] == [("#0", PREFILL, 0.0, 0.25), ("#0", DECODE, 0.25, 0.5)]
    assert ("#1", WAITS, 0.5, 1.0) in bars
    assert ("#2", WAITS, 0.5, 2.0) in bars, "since the turn it goes on from, not the one before it in time"
    assert not any(bar[:2] == ("#4", WAITS) for bar in bars), "nobody says when a sub-agent began"


@given(st.text())
def test_tokens_are_text_whoever_wrote_them(text: str) -> None:
    turn = in_order(forked())[0].turn

    def decode(_: Any) -> str:
        return text

    for made in (prompt_html(turn, decode), sampled_html(turn.completion, decode, by_version=True)):
        inner = made[made.index(">") + 1 : made.rindex("</div>")]
        assert not set("\n\r") & set(made), "no line ends, so that no line is empty"
        assert "<script" not in inner
        assert inner.count("<") == 2 * inner.count("<span "), "no tag but our own"


def test_a_token_tells_its_logprob_and_weights_and_the_unlikely_is_darker() -> None:
    made = sampled_html(completion(0), texts, by_version=False)
    assert 'title="id 3, logprob -0.100, weights 5"' in made
    likely, unlikely = (int(part.split(", ")[1]) for part in made.split("rgb(")[1:])
    assert unlikely < likely
    assert sampled_html(completion(0), texts, by_version=True) != made


def row(**over: Any) -> Any:
    base = {"trajectory": "3.1", "domain": "calc", "reward": 1.0, "death": None, "turns": 1, "forks": {}}
    return base | over


@pytest.mark.parametrize(
    ("of", "kinds"),
    [
        (row(), {"all", "rewarded"}),
        (row(reward=0.0, forks={"branch": 1}), {"all", "not rewarded", FORKED}),
        (row(reward=None, death="timeout"), {"all", "died"}),
    ],
)
def test_rows_are_found_by_what_became_of_them(of: Any, kinds: set[str]) -> None:
    assert {kind for kind in ("all", "rewarded", "not rewarded", "died", FORKED) if matches(of, kind, None)} == kinds
    assert matches(of, "all", "calc")
    assert not matches(of, "all", "shop")
    assert label(of).startswith("3.1   calc, ")


# --- the page ------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A live run with one item of two members, one of which died."""
    root = tmp_path_factory.mktemp("runs")
    folder = RunFolder.create(root, load("quickstart"), ["forge"])
    pool = Pool(folder.path / "pool.sqlite")
    pool.put_task(0, {"id": "task", "data": {}})
    pool(ev.Submitted(t=0.0, position=0, domain="calc", difficulty=1.0, members=2))
    pool.deliver(forked(0), attempt=0)
    pool.deliver(forked(1, reward=None, reason=DeathReason.TIMEOUT), attempt=0)
    pool(ev.Finished(t=1.0, position=0, tokens=12, reward=1.0))
    pool.close()
    folder.path.rename(root / "a-run")
    return root


def page(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FORGE_RUNS", str(runs))
    code = "from dashboards import page_trajectory\npage_trajectory.page()"
    app = testing.AppTest.from_string(code, default_timeout=60).run()
    assert not app.exception, app.exception
    assert not app.error, [one.value for one in app.error]
    return app


def words(app: Any) -> str:
    return " ".join(one.value for one in [*app.markdown, *app.caption])


def test_the_page_shows_a_trajectory_and_its_group(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = page(runs, monkeypatch)
    assert "0.0  calc, difficulty 1, finished: reward 1" in words(app)
    assert "0: 1, 1: timeout" in words(app)
    assert len(app.expander) == 5
    app.selectbox(key="trajectory-outcome").set_value("died").run()
    assert "died: timeout" in words(app)
    app.selectbox(key="trajectory-domain").set_value("calc").run()
    assert "died: timeout" in words(app)
    app.selectbox(key="trajectory-outcome").set_value("not rewarded").run()
    assert app.info[0].value.startswith("No trajectory of this kind")


def test_without_a_live_run_the_page_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "forge run quickstart" in page(tmp_path, monkeypatch).info[0].value


def test_a_run_without_a_pool_is_told() -> None:
    with pytest.raises(ForgeError, match=r"holds no pool\.sqlite"), trajectories.reading(RunFolder(Path("nowhere"))):
        pass
