"""Tables against the trace they come from: counts, sums, one row by hand, kills and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_metrics import story
from worlds import scenario, trace_of

from forge import tables as tb
from forge import trace as ev
from forge.metrics import fold

Row = dict[str, Any]


def tables_of(events: list[ev.Event], folder: Path) -> tuple[list[Row], list[Row]]:
    paths = tb.write_tables(events, folder)
    assert {p.name for p in folder.iterdir()} == {"requests.parquet", "items.parquet"}
    requests, items = (pq.read_table(p).to_pylist() for p in paths)
    return requests, items


def test_a_story_gives_the_rows_worked_out_by_hand(tmp_path: Path) -> None:
    requests, items = tables_of(story(), tmp_path)
    assert requests == [
        {
            "request": "a",
            "position": 0,
            "member": 0,
            "turn": 0,
            "domain": "agent",
            "instance": 0,
            "item_submitted_s": 0.0,
            "routed_s": 1.0,
            "first_token_s": 1.5,
            "completed_s": 2.5,
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "tokens": 5,
            "ttft_s": 0.5,
            "tpot_s": 0.25,
            "finish": "stop",
            "version_first": 0,
            "version_last": 0,
        }
    ]
    assert items[0] == {
        "position": 0,
        "domain": "agent",
        "difficulty": 2.0,
        "members": 2,
        "survivors": 1,
        "state": "published",
        "submitted_s": 0.0,
        "finished_s": 3.0,
        "taken_s": 3.0,
        "committed_s": 7.0,
        "published_s": 8.0,
        "dead_s": None,
        "death_reason": None,
        "step": 1,
        "lag_items": 0,
        "lag_versions": 0,
        "version_first": 0,
        "version_last": 0,
        "tokens": 10,
        "reward": 1.0,
    }
    dead = items[1]
    assert (dead["state"], dead["dead_s"], dead["death_reason"], dead["tokens"]) == ("dead", 4.0, "timeout", 40)
    assert [i["published_s"] for i in items] == [8.0, None, 8.0, 10.0, 10.0]
    assert items[3]["lag_versions"] is None, "no request of it is known, so nor is what sampled it"


def test_staleness_counts_from_the_oldest_weights_in_an_item(tmp_path: Path) -> None:
    events = story()
    routed = [
        ev.Routed(t=5.0, request=r, position=4, member=m, turn=0, prompt_tokens=7, instance=0)
        for m, r in enumerate("bcd")
    ]
    ends = (("b", "stop", 3, (1, 1)), ("c", "length", 2, (0, 1)), ("d", "cancelled", 9, (-5, 7)))
    completed = [ev.Completed(t=6.0, request=r, tokens=n, finish=f, versions=v) for r, f, n, v in ends]
    at = next(i for i, e in enumerate(events) if e.t > 5.0)
    _, items = tables_of([*events[:at], *routed, *completed, *events[at:]], tmp_path)
    assert (items[4]["version_first"], items[4]["version_last"], items[4]["step"]) == (0, 1, 2)
    assert items[4]["lag_versions"] == 1


def agrees(events: list[ev.Event], requests: list[Row], items: list[Row]) -> None:
    """Counted and summed from the events alone, or by the fold that the figures come from."""
    run = fold(events)
    routed = [e for e in events if isinstance(e, ev.Routed)]
    completed = [e for e in events if isinstance(e, ev.Completed)]
    assert len(requests) == len(routed)
    assert sum(r["prompt_tokens"] for r in requests) == sum(e.prompt_tokens for e in routed)
    ended = [r for r in requests if r["completed_s"] is not None]
    assert len(ended) == len(completed)
    assert sum(r["tokens"] for r in ended) == run.sampled_tokens
    assert sorted(r["ttft_s"] for r in requests if r["ttft_s"] is not None) == pytest.approx(sorted(run.ttft_s))
    assert sorted(r["tpot_s"] for r in requests if r["tpot_s"] is not None) == pytest.approx(sorted(run.tpot_s))
    for row in requests:
        if row["completed_s"] is None:
            assert (row["tokens"], row["finish"], row["tpot_s"], row["version_last"]) == (None,) * 4
    assert [i["position"] for i in items] == list(run.items)
    for row, item in zip(items, run.items.values(), strict=True):
        for key in ("domain", "difficulty", "members", "submitted_s", "finished_s", "taken_s", "tokens", "reward"):
            assert row[key] == getattr(item, key), (key, row)
        assert (row["step"], row["lag_items"], row["dead_s"]) == (item.step, item.lag_items, item.dead_s)
        assert row["survivors"] == len(item.survivors)
        assert (row["committed_s"] is not None) == item.committed
        assert (row["lag_versions"], row["version_first"]) == (item.lag_versions, item.version)
        assert row["lag_versions"] is None or row["lag_versions"] >= 0
        assert (row["state"] == "dead") == (item.dead_s is not None)


@pytest.mark.parametrize("crashes", [(), (4.0, 9.0)], ids=["one life", "resumed twice"])
def test_tables_agree_with_their_trace(crashes: tuple[float, ...], tmp_path: Path) -> None:
    events = trace_of(scenario(), seed=3, crashes=crashes)
    requests, items = tables_of(events, tmp_path)
    agrees(events, requests, items)
    assert {i["state"] for i in items} == {"published", "dead"}
    lost = [r for r in requests if r["completed_s"] is None]
    assert bool(lost) == bool(crashes), "requests in flight at a crash, and only they, have no end"


def test_what_has_left_does_not_come_back_at_a_resume(tmp_path: Path) -> None:
    queue = {"states": ["published", "dead", "published", "published", "published"], "published": 4}
    resumed = ev.Resumed(
        t=11.0,
        life=1,
        queue=queue | {"committed": [0, 2, 4, 3]},
        items={},
        step=2,
        version=2,
        published_step=2,
    )
    _, items = tables_of([*story()[:-1], resumed], tmp_path)
    assert [i["position"] for i in items] == [0, 1, 2, 3, 4]
    assert [i["domain"] for i in items] == ["agent", "reasoning", "agent", "reasoning", "agent"]


@settings(max_examples=20, deadline=None, derandomize=True)
@given(share=st.floats(0, 1), seed=st.integers(0, 50), crash=st.sampled_from([(), (3.0,)]))
def test_tables_of_a_killed_run(
    share: float, seed: int, crash: tuple[float, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = trace_of(scenario(stop={"items": 20}), seed=seed, crashes=crash)
    cut = events[: max(1, int(share * len(events)))]
    agrees(cut, *tables_of(cut, tmp_path_factory.mktemp("cut")))


def test_rows_are_written_in_groups_and_no_sooner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    events = trace_of(scenario(), seed=3)
    whole = tables_of(events, tmp_path)
    monkeypatch.setattr(tb, "ROWS", 16)
    folder = tmp_path / "small"
    folder.mkdir()
    assert tables_of(events, folder) == whole
    groups = pq.ParquetFile(folder / "requests.parquet")
    assert groups.num_row_groups > 3
    waiting: list[int] = []
    extend: Callable[..., None] = tb.Table.extend
    monkeypatch.setattr(tb.Table, "extend", lambda self, rows: (extend(self, rows), waiting.append(len(self._rows)))[0])
    tb.write_tables(events, folder)
    assert max(waiting) < 16


def test_an_error_leaves_the_old_tables(tmp_path: Path) -> None:
    before = tables_of(story(), tmp_path)

    def broken() -> Any:
        yield story()[0]
        raise ev.TraceError("line 2")

    with pytest.raises(ev.TraceError):
        tb.write_tables(broken(), tmp_path)
    assert tables_of(story(), tmp_path) == before


def test_every_column_of_seconds_or_tokens_names_its_unit(tmp_path: Path) -> None:
    for path in tb.write_tables(story(), tmp_path):
        for column in pq.read_schema(path):
            unit = column.metadata[b"unit"].decode()
            assert (unit == "s") == column.name.endswith("_s"), column
            assert (unit == "tokens") == column.name.endswith("tokens"), column
