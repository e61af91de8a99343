"""Reports: complete, standing alone, the same twice, and honest about what they compare."""

from __future__ import annotations

import math
import random
import re
import time
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import World, scenario, trace_of

from forge import trace as ev
from forge.metrics import fold, summarise
from forge.report import series
from forge.report.comparison import gather, judge, write_comparison
from forge.report.page import headline, held_out_rows, write_report
from forge.report.plots import PLOTS
from forge.report.prediction import compare
from forge.runs import RunFolder
from forge.trace import TraceWriter
from forge.types import ForgeError, Json


def made(root: Path, *, seed: int = 1, kind: str = "windowed_fifo", crashes: tuple[float, ...] = ()) -> RunFolder:
    given = scenario(seed=seed, policy={"scheduler": {"kind": kind}})
    folder = RunFolder.create(root, given, command=["forge", "run", "tiny"])
    writer = TraceWriter(folder.trace)
    World(given, seed=seed, sinks=(writer,), crashes=crashes).run()
    writer.close()
    folder.write("summary.json", summarise(folder.events(), given))
    return folder


def evaluation(seed: int = 0) -> Json:
    rng = random.Random(seed)
    domains = {f"t{i}": ["agent", "reasoning"][i % 2] for i in range(100)}
    start = {task: float(rng.random() < 0.2) for task in domains}
    end = {task: float(rng.random() < 0.7) for task in domains}
    return {"decoding": "greedy", "start": {"scores": start}, "end": {"scores": end}, "domains": domains}


PREDICTION: Json = {
    "seeds": [0, 1, 2],
    "calibrated_from": "a probe",
    "figures": {
        "throughput_tokens_per_s": {"mean": 900.0, "low": 800.0, "high": 1000.0},
        "engine_idle_fraction": {"mean": 0.5, "low": 0.45, "high": 0.55},
    },
}


class Reader(HTMLParser):
    """Checks that tags balance, and keeps sources and text."""

    VOID = ("meta", "img", "link", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [v or "" for k, v in attrs if k in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text())
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = made(tmp_path_factory.mktemp("runs"), crashes=(5.0,))
    folder.write("evaluation.json", evaluation())
    folder.write("prediction.json", PREDICTION)
    write_report(folder, others=[folder])
    return folder


def test_the_page_stands_alone_and_says_what_to_look_for(folder: RunFolder) -> None:
    page = read(folder.path / "report.html")
    assert len(page.sources) == len(PLOTS)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    text = " ".join(page.text.split())
    assert text.count("Look for ") == len(PLOTS) + 1
    for words in (
        "Law check: every law",
        "2 lives",
        "Predicted against measured",
        "seed 1",
        "forge run tiny",
        "better",
    ):
        assert words in text
    assert "—%" not in text


def test_every_picture_lies_beside_the_page(folder: RunFolder) -> None:
    for name in PLOTS:
        assert (folder.path / name).read_bytes().startswith(b"\x89PNG")


def test_the_same_run_gives_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.report.page.PLOTS", {"lag.png": PLOTS["lag.png"]})
    first, second = (write_report(made(tmp_path / name)).read_bytes() for name in ("a", "b"))
    assert first == second


def test_a_broken_law_is_the_first_thing_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge.report.page.PLOTS", {})  # drawing takes seconds
    folder = made(tmp_path)
    lines = folder.trace.read_text().splitlines(keepends=True)
    lie = next(i for i, line in enumerate(lines) if '"e":"taken"' in line)
    lines[lie] = re.sub(r'"lag_items":\d+', '"lag_items":99', lines[lie])
    folder.trace.write_text("".join(lines))
    assert "laws were broken" in read(write_report(folder)).text


def test_a_run_killed_at_once_still_reports(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, scenario())
    folder.trace.write_text(ev.encode(ev.RunStarted(t=0.0, schema=1, world="sim", scenario="tiny", seed=1)) + "\n")
    assert "Simulated run" in read(write_report(folder)).text


def test_headline_prefers_held_out_tasks() -> None:
    summary = summarise(trace_of(scenario()), scenario())
    labels = [label for label, _ in headline(summary)]
    assert labels == ["Training reward", "Throughput", "Idle", "Largest lag", "Non-stationarity", "J", "Died unused"]
    summary["dead"], summary["refused"] = dict.fromkeys(summary["dead"], 0), 7
    assert headline(summary)[-1] == ("Refused", "7 requests (429), asked again")
    label, text = headline(summary, evaluation())[0]
    assert label == "Held-out reward"
    assert re.fullmatch(r"0\.\d{3} → 0\.\d{3} \(\+0\.\d{3} \[\+0\.\d{3}, \+0\.\d{3}\]\)", text)


def test_held_out_rows_per_domain_and_in_all() -> None:
    rows = held_out_rows(evaluation())
    assert [(r.name, r.tasks) for r in rows] == [("agent", 50), ("reasoning", 50), ("all", 100)]
    assert rows[2].gain.mean == pytest.approx((rows[0].gain.mean + rows[1].gain.mean) / 2)
    with pytest.raises(ForgeError, match="needs start"):
        held_out_rows({"start": {"scores": {"a": 1.0}}})
    missing = evaluation()
    del missing["end"]["scores"]["t0"]
    with pytest.raises(ForgeError, match="same tasks"):
        held_out_rows(missing)


def test_a_long_run_shows_what_its_first_minute_foretold(tmp_path: Path) -> None:
    folder = made(tmp_path)
    of_rest = {"cut_s": 60.0, "end_s": 300.0, "measured": {"throughput_tokens_per_s": 750.0}}
    folder.write("recalibration.json", PREDICTION | of_rest)
    text = write_report(folder).read_text()
    assert "Calibrated again on the first 60 s, scored on the rest" in text
    assert "+20.0%" in text


def test_prediction_errors_by_hand() -> None:
    rows = compare(PREDICTION, {"throughput_tokens_per_s": 750.0, "engine_idle_fraction": None})
    assert rows[0].error == pytest.approx(0.2)
    assert (rows[0].low, rows[0].high) == (700.0, 1100.0)  # half width 100 of a mean of 3 is 200 of one run
    assert rows[0].is_inside is True
    assert rows[1].error is None
    assert compare(PREDICTION, {"engine_idle_fraction": 0.4})[1].error == pytest.approx(0.1)
    with pytest.raises(ForgeError, match="figures"):
        compare({"throughput": 1}, {})


# --- series ------


def test_states_of_an_item_by_hand() -> None:
    """W = 1: item 1 finishes first and is blocked until item 0 is taken."""
    rows: list[ev.Event] = [
        ev.Submitted(t=0.0, position=p, domain="a", difficulty=0.0, members=1) for p in range(2)
    ] + [
        ev.Finished(t=1.0, position=1, tokens=1, reward=0.0),
        ev.Finished(t=3.0, position=0, tokens=1, reward=0.0),
        ev.Taken(t=4.0, position=0, lag_items=0),
        ev.Taken(t=6.0, position=1, lag_items=1),
        ev.RunEnded(t=9.0, reason="stopped"),
    ]
    run = fold(rows)
    got = {(s.position, s.state): (s.start_s, s.end_s) for s in series.spans(run, 1)}
    assert got == {
        (0, "running"): (0.0, 3.0),
        (0, "finished"): (3.0, 4.0),
        (0, "taken"): (4.0, 9.0),
        (1, "running"): (0.0, 1.0),
        (1, "blocked"): (1.0, 4.0),
        (1, "finished"): (4.0, 6.0),
        (1, "taken"): (6.0, 9.0),
    }
    free = {(s.position, s.state) for s in series.spans(run, None)}
    assert (1, "blocked") not in free
    counted = series.counts(series.spans(run, 1), np.array([0.5, 2.0, 5.0]))
    assert {state: n.tolist() for state, n in counted.items()} == {
        "running": [2, 1, 0],
        "blocked": [0, 1, 0],
        "finished": [0, 0, 1],
        "taken": [0, 0, 1],
    }


moves = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=12)


@given(moves, st.integers(-2, 8), st.floats(0, 20))
def test_when_the_head_is_reached_is_what_looking_at_every_move_finds(
    drawn: list[tuple[int, int]], head: int, since_s: float
) -> None:
    """Whatever the head does, resumes included."""
    times = list(accumulate(float(wait) for wait, _ in drawn))
    heads = [to for _, to in drawn]
    now = max([i for i, t in enumerate(times) if t <= since_s], default=0)
    later = [i for i in range(now, len(heads)) if heads[i] >= head]
    expected = math.inf if not later else since_s if later[0] == now else times[later[0]]
    assert series.Heads(list(zip(times, heads, strict=True))).reached_s(head, since_s) == expected


def test_the_queue_of_many_items_takes_a_moment() -> None:
    """Items that wait for the head to come near, as many as there are: once each looked at every move."""
    count = 200_000
    heads = series.Heads([(float(i), i) for i in range(count)])
    began = time.process_time()
    assert all(heads.reached_s(i, 0.0) == i for i in range(count))
    assert time.process_time() - began < 5.0


def test_busy_shares_add_up_to_the_summary() -> None:
    given = scenario()
    events = trace_of(given)
    run, summary = fold(events), summarise(events, given)
    edges = np.linspace(0, run.wall_s, 11)
    engine, trainer = series.busy_shares(run, 2, edges)
    assert 1 - engine.mean() == pytest.approx(summary["engine_idle_fraction"])
    assert 1 - trainer.mean() == pytest.approx(summary["trainer_idle_fraction"])


def test_every_instance_has_its_own_busy_share() -> None:
    usage = {"steps": (1, 1), "prefill_tokens": (1, 1), "decode_tokens": (1, 1)}
    rows: list[ev.Event] = [ev.Submitted(t=0.0, position=0, domain="a", difficulty=0.0, members=1)]
    rows += [ev.Usage(t=2.0, busy_s=(2.0, 0.0), **usage), ev.Usage(t=4.0, busy_s=(3.0, 2.0), **usage)]
    # A new life counts from 0 again.
    queue = {"states": ["running"], "committed": [], "published": 0}
    rows += [ev.Resumed(t=4.0, life=1, queue=queue, items={}, step=0, version=0, published_step=0)]
    rows += [ev.Usage(t=6.0, busy_s=(0.0, 1.0), **usage)]
    shares = series.instance_shares(fold(rows), np.array([0.0, 2.0, 4.0, 6.0]))
    assert shares.tolist() == [[1.0, 0.5, 0.0], [0.0, 1.0, 0.5]]


def test_shares_believed_cached_by_hand() -> None:
    rows: list[ev.Event] = [
        ev.Routed(t=t, request=str(t), position=0, member=0, turn=0, prompt_tokens=n, instance=0, cached_tokens=c)
        for t, n, c in ((0.5, 10, 0), (0.6, 30, 10), (2.5, 8, 8))
    ]
    shares = series.cached_shares(fold(rows), np.array([0.0, 1.0, 2.0, 3.0]))
    assert shares[[0, 2]].tolist() == [0.25, 1.0]
    assert np.isnan(shares[1])


# --- several runs ------


def measured(folder: RunFolder, throughput: float, predicted: float | None = None) -> None:
    summary = folder.read("summary.json") or {}
    folder.write("summary.json", summary | {"throughput_tokens_per_s": throughput})
    if predicted is not None:
        figures = {"throughput_tokens_per_s": {"mean": predicted, "low": predicted, "high": predicted}}
        folder.write("prediction.json", {"seeds": [0], "calibrated_from": None, "figures": figures})


@pytest.mark.parametrize(
    ("strict", "greedy", "predicted", "verdict"),
    [
        ([100.0, 101.0, 102.0], [200.0, 201.0, 202.0], (1.0, 2.0), "as predicted"),
        ([100.0, 101.0, 102.0], [200.0, 201.0, 202.0], (2.0, 1.0), "against the prediction"),
        ([100.0, 150.0, 200.0], [120.0, 160.0, 220.0], (1.0, 2.0), "intervals overlap"),
        ([100.0, 101.0, 102.0], [200.0, 201.0, 202.0], (None, 2.0), "no prediction"),
        ([100.0], [200.0], (1.0, 2.0), "too few seeds"),
    ],
)
def test_order_is_judged_only_where_intervals_part(
    tmp_path: Path, strict: list[float], greedy: list[float], predicted: tuple[Any, Any], verdict: str
) -> None:
    template = made(tmp_path)
    folders = []
    for kind, values, guess in (("strict_fifo", strict, predicted[0]), ("greedy", greedy, predicted[1])):
        for seed, value in enumerate(values):
            folder = RunFolder.create(tmp_path, scenario(seed=seed, policy={"scheduler": {"kind": kind}}))
            folder.write("summary.json", (template.read("summary.json") or {}) | {"seed": seed})
            measured(folder, value, guess)
            folders.append(folder)
    groups = gather(folders)
    order = judge("throughput_tokens_per_s", *groups)
    assert order is not None
    assert order.verdict.startswith(verdict)
    assert order.higher.startswith("greedy")


def test_a_comparison_is_written(tmp_path: Path) -> None:
    folders = [made(tmp_path / "runs", seed=s, kind=k) for k in ("strict_fifo", "fffo") for s in (1, 2)]
    page = read(write_comparison(folders, tmp_path / "out"))
    assert "fffo (live)" in page.text
    assert "J (trained, times modelled efficiency)" in page.text
    assert "no winner by J" in page.text
    assert (tmp_path / "out" / "comparison.png").is_file()
    assert (tmp_path / "out" / "comparison.json").is_file()
    with pytest.raises(ForgeError, match="at least two policies"):
        write_comparison(folders[:2], tmp_path / "out")
