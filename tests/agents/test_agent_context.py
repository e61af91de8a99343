"""Contexts as explicit state: laws of the operations, and rebuilding from their log."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.agents.context import DROPPED, Context
from forge.agents.operations import (
    OPERATIONS,
    Append,
    DropResults,
    Edit,
    Extract,
    Fold,
    FoldEach,
    Operation,
    Restore,
    Summarise,
    Truncate,
    Window,
    from_row,
    to_row,
)
from forge.agents.record import Conversation, rebuild, record
from forge.types import ForgeError

OPENING = [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}]
NUMBERS = st.integers(0, 5)
TEXTS = st.text(max_size=8)
CHANGES = st.one_of(
    st.builds(Window, turns=NUMBERS),
    st.builds(Truncate, turns=NUMBERS),
    st.builds(Restore, turns=st.integers(1, 5)),
    st.builds(DropResults, keep=NUMBERS),
    st.builds(Extract, keep=NUMBERS),
    st.builds(FoldEach, keep=NUMBERS),
    st.builds(Fold, turns=st.integers(1, 5), text=TEXTS),
    st.builds(Summarise, keep=NUMBERS, text=TEXTS),
    st.builds(Edit, turns=st.integers(1, 5), text=TEXTS),
)


def turn(number: int, results: int, text: str) -> list[Append]:
    """A reply with calls, and what came of each."""
    ids = [f"c{number}.{nth}" for nth in range(results)]
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in ids]
    said: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": calls}
    told = [{"role": "tool", "tool_call_id": one, "content": f"{text} result {one}"} for one in ids]
    return [
        Append(message=said, origin="policy"),
        *(Append(message=one, origin="tool", fact=f"f={one['content']}") for one in told),
    ]


@st.composite
def logs(draw: st.DrawFn) -> list[Operation]:
    """Whole turns, and changes between them."""
    log: list[Operation] = []
    for number in range(draw(st.integers(0, 6))):
        log += turn(number, draw(st.integers(0, 3)), draw(TEXTS))
        log += draw(st.lists(CHANGES, max_size=3))
    return log


def after(log: list[Operation]) -> Context:
    context = Context.begin(OPENING)
    for operation in log:
        context = operation.apply(context)
    return context


@settings(max_examples=50)
@given(logs())
def test_every_served_context_is_rebuilt_byte_for_byte_from_the_record(log: list[Operation]) -> None:
    talk = Conversation(0, OPENING)
    served, shown = [], []
    for operation in log:
        talk.do(operation)
        served.append((0, len(talk.log)))
        shown.append(json.dumps(talk.context.messages))
    recorded = record([talk], served)
    if recorded is None:
        assert all(isinstance(one, Append) for one in talk.log)
        return
    read = json.loads(json.dumps(recorded))
    assert [json.dumps(messages) for messages in rebuild(read)] == shown


@settings(max_examples=50)
@given(logs())
def test_the_opening_stays_and_no_call_is_without_its_results(log: list[Operation]) -> None:
    context = after(log)
    messages = context.messages
    assert messages[:2] == OPENING
    assert [entry.turn for entry in context.entries] == sorted(entry.turn for entry in context.entries)
    asked = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == asked


@settings(max_examples=50)
@given(logs(), CHANGES)
def test_operations_leave_what_they_are_given_alone_and_are_rows(log: list[Operation], change: Operation) -> None:
    context = after(log)
    before = json.dumps(context.messages)
    changed = change.apply(context)
    assert json.dumps(context.messages) == before
    assert changed.archive == context.archive
    assert from_row(json.loads(json.dumps(to_row(change)))) == change


@settings(max_examples=50)
@given(logs(), st.one_of(*(st.builds(one, keep=NUMBERS) for one in (DropResults, Extract, FoldEach)), CHANGES))
def test_rules_applied_again_change_nothing(log: list[Operation], change: Operation) -> None:
    if isinstance(change, Window | DropResults | Extract | FoldEach | Edit):
        once = change.apply(after(log))
        assert change.apply(once).messages == once.messages


@settings(max_examples=50)
@given(logs(), st.one_of(st.builds(Truncate, turns=NUMBERS), st.builds(DropResults, keep=NUMBERS)))
def test_all_that_was_dropped_can_be_restored(log: list[Operation], change: Operation) -> None:
    appended = after([one for one in log if isinstance(one, Append)])
    assert Restore(turns=100).apply(change.apply(appended)).messages == appended.messages


def test_what_each_operation_does() -> None:
    context = after([*turn(1, 1, "one"), *turn(2, 1, "two"), *turn(3, 1, "three")])

    def shown(operation: Operation) -> list[str]:
        return [message["content"] for message in operation.apply(context).messages[2:]]

    first, second, third = (["one", "one result c1.0"], ["two", "two result c2.0"], ["three", "three result c3.0"])
    assert shown(Window(turns=1)) == third
    assert shown(Truncate(turns=1)) == [*second, *third]
    assert shown(DropResults(keep=1)) == ["one", DROPPED, "two", DROPPED, *third]
    assert shown(Extract(keep=1)) == ["f=one result c1.0\nf=two result c2.0", *third]
    assert shown(FoldEach(keep=1)) == ["f=one result c1.0", "f=two result c2.0", *third]
    assert shown(Fold(turns=2, text="done")) == [*first, "done"]
    assert shown(Summarise(keep=0, text="all")) == ["all"]
    assert shown(Edit(turns=1, text="x")) == [*first, *second, "three", "x"]


def test_every_operation_is_registered_and_others_are_refused() -> None:
    assert len(set(OPERATIONS.values())) == len(OPERATIONS) == 10
    with pytest.raises(ForgeError, match="context operation 'forget'"):
        from_row({"op": "forget"})
    with pytest.raises(ForgeError, match="window"):
        from_row({"op": "window", "size": 2})
