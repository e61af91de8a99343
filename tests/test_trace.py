from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge import trace as ev
from forge.replay import replay_policies
from forge.scenario import parse

START = ev.RunStarted(t=0.0, schema=ev.SCHEMA, world="live", scenario="x", seed=1)
finite = st.floats(0, 1e6)


@given(finite, st.integers(0, 10**6), st.text(), st.none() | finite)
def test_events_read_back_exactly(t: float, position: int, text: str, reward: float | None) -> None:
    events: list[ev.Event] = [
        ev.Submitted(t=t, position=position, domain=text, difficulty=t, members=8),
        ev.Finished(t=t, position=position, tokens=5, reward=reward),
        ev.Parked(t=t, position=position),
        ev.StepStarted(t=t, step=1, positions=(position, 3), partial=True),
        ev.Committed(t=t, step=1, positions=(1,), train_s=t, data_s=t, io_s=t, tokens=1, metrics={"a": reward}),
        ev.PolicyCall(t=t, slot="router", method="route", args={"turn": 1}, draw=0.5, view=7, decision=None),
        ev.Resumed(
            t=t, life=1, queue={"states": []}, items={"3": ("a", 1.0, None)}, step=1, version=1, published_step=1
        ),
    ]
    for event in events:
        back = ev.decode(ev.encode(event))
        assert ev.encode(back) == ev.encode(event)
        if not isinstance(event, ev.Resumed):  # its tables of rows come back as lists
            assert back == event


def test_every_kind_has_its_own_name() -> None:
    assert len(ev.KINDS) == len({cls.__name__ for cls in ev.Event.__subclasses__()})
    assert all(getattr(ev, cls.__name__) is cls for cls in ev.KINDS.values())


def test_traces_of_schema_1_are_read_and_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    old = replace(START, schema=1)
    path.write_text(ev.encode(old) + "\n")
    assert list(ev.read(path)) == [old]
    given_scenario = parse({"name": "x", "stop": {"items": 1}, "domains": [{"name": "a"}], "seed": 1}, "test")
    found = replay_policies([old], given_scenario).difference
    assert found is not None
    assert (found.what, found.traced) == ("schema, and with it what views hold", "1")


def test_a_torn_last_line_is_dropped_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = ev.TraceWriter(path)
    writer(START)
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"t":1.0,"e":"fini')
    assert list(ev.read(path)) == [START]
    ev.cut_torn_tail(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"t":0,"e":"nonsense"}\n', "trace.jsonl:1: not a trace event"),
        ("[]\n", "trace.jsonl:1: not a trace event"),
        (
            '{"t":0,"e":"run_started","schema":99,"world":"sim","scenario":"x","seed":0}\n',
            "a trace of schema 2 begins with run_started; here is schema 99",
        ),
        (ev.encode(START) + "\nnot json\n", "trace.jsonl:2: not a trace event"),
        (ev.encode(START) + '\n{"t":0,"e":"taken","position":1}\n', "trace.jsonl:2"),
    ],
)
def test_junk_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ev.TraceError, match=complaint):
        list(ev.read(path))


def test_a_missing_trace_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(ev.TraceError, match="no trace here"):
        list(ev.read(tmp_path / "trace.jsonl"))
