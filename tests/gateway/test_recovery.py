"""Trajectory recovery: what agents do to their histories, and what the tree makes of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forge.gateway.recovery import Conversations, Fork, differences
from forge.types import Json

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def said(text: str, *calls: tuple[str, str, str], reasoning: str = "") -> Json:
    message: Json = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, name, arguments in calls
        ]
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def result(call: str, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call, "content": text}


@dataclass(frozen=True)
class Where:
    """A request's place, why it forks, and how the reply it goes on from came back."""

    parent: int | None
    known: int
    fork: Fork | None
    echo: tuple[str, ...] = ()


@dataclass
class Recorded:
    """Requests and replies in turn; every one has its own ids."""

    tree: Conversations = field(default_factory=Conversations)

    def ask(self, messages: list[Json], reply: Json, tools: list[Json] | None = None, **hints: bool) -> Where:
        place = self.tree.place(messages, tools or [])
        number = len(self.tree.nodes)
        echo: tuple[str, ...] = ()
        if place.parent is not None:
            echo = differences(self.tree.nodes[place.parent].reply, messages[place.known - 1])
        fork = self.tree.add(
            number, place, messages, tools or [], reply=reply, prompt_ids=(number,), sampled_ids=(9,), **hints
        )
        return Where(place.parent, place.known, fork, echo)


A, B = [system("be brief"), user("add 1 and 2")], said("", ("call_1", "calc", '{"expression": "1+2"}'))


def test_an_appended_history_is_one_branch() -> None:
    run = Recorded()
    assert run.ask(A, B) == Where(None, 0, Fork.ROOT)
    second = [*A, B, result("call_1", "3")]
    assert run.ask(second, said("3")) == Where(0, 3, None)
    third = [*second, said("3"), user("and 4?")]
    assert run.ask(third, said("7")) == Where(1, 5, None)
    assert run.tree.echoes == {"exact": 2}


@pytest.mark.parametrize(
    ("echo", "kinds"),
    [
        (said("", ("call_1", "calc", '{"expression":"1+2"}')), ("arguments_rewritten",)),
        (said("", ("call_1", "invalid", '{"tool":"calc"}')), ("call_renamed", "arguments_changed")),
        (said("hm", ("call_1", "calc", '{"expression": "1+2"}')), ("text_changed",)),
    ],
)
def test_a_reply_is_known_by_its_calls_ids_however_it_came_back(echo: Json, kinds: tuple[str, ...]) -> None:
    run = Recorded()
    run.ask(A, B)
    assert run.ask([*A, echo, result("call_1", "3")], said("3")) == Where(0, 3, None, kinds)
    assert run.ask([*A, echo, result("call_1", "3"), said("3"), user("more")], said("ok")).parent == 1
    assert run.tree.echoes == {**dict.fromkeys(kinds, 1), "exact": 1}


def test_text_beside_calls_and_reasoning_may_be_dropped() -> None:
    run = Recorded()
    run.ask(A, said("let me see", ("call_1", "calc", '{"x": 30.0}'), reasoning="easy"))
    place = run.ask([*A, said("", ("call_1", "calc", '{"x":30}')), result("call_1", "3")], said(" 3\n", reasoning="so"))
    assert place == Where(0, 3, None, ("text_dropped", "reasoning_dropped", "arguments_rewritten"))
    place = run.ask([*A, said("", ("call_1", "calc", "{}")), result("call_1", "3"), said("3"), user("?")], said("."))
    assert place == Where(1, 5, None, ("whitespace", "reasoning_dropped"))


def test_clients_that_make_ids_of_their_own_are_known_by_name_and_arguments() -> None:
    run = Recorded()
    run.ask(A, B)
    echo = said("", ("their_1", "calc", '{ "expression" : "1+2" }'))
    assert run.ask([*A, echo, result("their_1", "3")], said("3")).parent == 0


def test_forks_and_their_reasons() -> None:
    run = Recorded()
    first = [system("s"), user("one")]
    run.ask(first, said("first answer"))
    assert run.ask(first, said("another")).fork is Fork.RESAMPLE
    longer = [*first, said("first answer"), user("two")]
    assert run.ask(longer, said("second answer")).fork is None
    assert run.ask([*longer[:-1], user("three")], said("x")) == Where(0, 3, Fork.BRANCH)
    assert run.ask(longer, said("third answer")) == Where(0, 3, Fork.RESAMPLE)
    rewritten = [*first, said("first ANSWER, corrected"), user("two")]
    assert run.ask(rewritten, said("y")) == Where(None, 0, Fork.REWRITE)
    partly = [*longer, said("not what was said"), user("go on")]
    assert run.ask(partly, said("z")) == Where(0, 3, Fork.REWRITE)
    few_shot = [system("other"), user("q"), said("a canned answer"), user("one")]
    assert run.ask(few_shot, said("w")) == Where(None, 0, Fork.INVENTED)
    assert run.ask(first, said("with tools"), TOOLS).fork is Fork.TOOLS
    assert run.ask([system("you are a helper"), user("look it up")], said("found")).fork is Fork.APART
    assert run.ask([*first, user("sub")], said("v"), is_sub_agent=True).fork is Fork.SUB_AGENT


def test_left_out_turns_are_a_truncation() -> None:
    run = Recorded()
    history = [system("s"), user("task")]
    for turn in range(5):
        reply = said("", (f"c{turn}", "calc", "{}"))
        run.ask(history, reply)
        history = [*history, reply, result(f"c{turn}", f"r{turn}")]
    cut = [history[0], history[1], *history[6:]]
    assert run.ask(cut, said("", ("c5", "calc", "{}"))) == Where(None, 0, Fork.TRUNCATION)
    assert run.ask([*cut, said("", ("c5", "calc", "{}")), result("c5", "r5")], said("done")) == Where(5, 9, None)


@pytest.mark.parametrize("wrapped", ["{}", "<analysis>\nLong.\n</analysis>\n\n<summary>\n{}\n</summary>"])
def test_a_history_begun_anew_around_a_sampled_summary_is_a_compaction(wrapped: str) -> None:
    """All that was sampled, or what it put between tags."""
    run = Recorded()
    history = [system("s"), user("a long task")]
    run.ask(history, said("", ("c0", "calc", "{}")))
    history = [*history, said("", ("c0", "calc", "{}")), result("c0", "r")]
    run.ask(history, said("", ("c1", "calc", "{}")))
    summary = "So far: the task is long, and r came out."
    run.ask([system("summarise"), user("all of it")], said(wrapped.format(summary)))
    compacted = [system("s"), user(f"Summary of before:\n{summary}\nGo on.")]
    assert run.ask(compacted, said("", ("c2", "calc", "{}"))).fork is Fork.COMPACTION


def test_a_call_or_a_reply_that_is_quoted_says_what_a_new_conversation_is() -> None:
    run = Recorded()
    s, long = system("s"), "The answer is a long one: forty-two."
    run.ask([s, user("one")], said("", ("c0", "task", '{"prompt": "look into it "}')), TOOLS)
    assert run.ask([system("helper"), user("look into it")], said(long)).fork is Fork.SUB_AGENT
    # A title, a commit message: the reply is quoted, but nothing of ours goes on.
    assert run.ask([system("name it"), user(f"Name this: {long}")], said("A name")).fork is Fork.APART
    assert run.ask([s, user("one"), user(long) | {"name": "bob"}], said("I see, Bob."), TOOLS).fork is Fork.APART
    assert run.ask([s, user("a new task")], said("Yes."), TOOLS).fork is Fork.APART
    assert run.ask([s, user("a new task"), said("Yes."), user("so?")], said("No."), TOOLS).fork is None
    assert run.ask([s, user(f"Before: {long}")], said("Going on from there."), TOOLS).fork is Fork.COMPACTION
    # The same summary, later: now it is one of the turns.
    history = [s, user(f"Before: {long}"), said("Going on from there."), user("and?")]
    assert run.ask(history, said("So much for that."), TOOLS) == Where(6, 3, None, ())
    cut = [s, user(f"Before: {long}"), said("So much for that."), user("more")]
    assert run.ask(cut, said("x"), TOOLS).fork is Fork.TRUNCATION
    # A summary may stand as the assistant's own words.
    told = [s, user("What did we do?"), said(long), user("Go on.")]
    assert run.ask(told, said("y"), TOOLS).fork is Fork.COMPACTION


def test_a_reply_that_is_left_out_and_tools_that_change() -> None:
    run = Recorded()
    first = [system("s"), user("one")]
    run.ask(first, said("no call"), TOOLS)
    again = [*first, user("call a tool!")]
    assert run.ask(again, said("", ("c1", "calc", "{}")), TOOLS) == Where(None, 0, Fork.TRUNCATION)
    done = [*again, said("", ("c1", "calc", "{}")), result("c1", "1")]
    assert run.ask(done, said("still no call"), TOOLS) == Where(1, 4, None)
    assert run.ask([*done, user("call!")], said("z"), TOOLS) == Where(1, 4, Fork.TRUNCATION)
    assert run.ask(done, said("reflected, without tools")).fork is Fork.TOOLS
    back = [*done, said("reflected, without tools"), user("next")]
    assert run.ask(back, said("w"), TOOLS) == Where(1, 4, Fork.TOOLS)


def test_interleaved_sub_agents_stay_apart() -> None:
    run = Recorded()
    mine, theirs = [system("main"), user("m")], [system("sub"), user("t")]
    run.ask(mine, said("m0", ("a", "calc", "{}")))
    run.ask(theirs, said("t0", ("b", "calc", "{}")))
    mine += [said("m0", ("a", "calc", "{}")), result("a", "1")]
    theirs += [said("t0", ("b", "calc", "{}")), result("b", "1")]
    assert run.ask(mine, said("m1")).parent == 0
    assert run.ask(theirs, said("t1")).parent == 1


# --- any agent ------


class Agents(RuleBasedStateMachine):
    """Histories that append, branch, are sampled again and interleave: every echo is found, however it came back."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Recorded()
        self.histories: list[tuple[list[Json], int]] = []  # up to a reply, and the node that sampled it
        self.count = 0

    def reply(self, calls: int, text: str) -> Json:
        self.count += 1
        made = [(f"call_{self.count}_{i}", "calc", json.dumps({"n": self.count * 1.0, "ü": i})) for i in range(calls)]
        # A text reply is its own only if no other says the same there, as ids are: two equal ones are one to a client.
        return said(text if calls else f"{text} {self.count}", *made)

    def ask(self, messages: list[Json], calls: int, text: str) -> Where:
        reply = self.reply(calls, text)
        place = self.run.ask(messages, reply, TOOLS)
        self.histories.append(([*messages, reply], len(self.run.tree.nodes) - 1))
        return place

    @rule(name=st.integers(0, 3), calls=st.integers(0, 2), text=st.sampled_from(["", "so", " hm\n"]))
    def begin(self, name: int, calls: int, text: str) -> None:
        self.ask([system(f"agent {name}"), user(f"task {self.count}")], calls, text)

    @precondition(lambda self: self.histories)
    @rule(data=st.data(), calls=st.integers(0, 2), mangled=st.booleans(), text=st.sampled_from(["", "so", " hm\n"]))
    def go_on(self, data: Any, calls: int, mangled: bool, text: str) -> None:
        history, node = data.draw(st.sampled_from(self.histories))
        known = len(history)
        if mangled:
            history = [mangle(one) for one in history]
        last = history[-1]
        answers = [result(i["id"], str(self.count)) for i in last.get("tool_calls", ())] or [user(f"u{self.count}")]
        children = list(self.run.tree.nodes[node].children)
        place = self.ask([*history, *answers], calls, text)
        assert (place.parent, place.known) == (node, known)
        assert place.fork in ((Fork.BRANCH, Fork.RESAMPLE) if children else (None,))

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def rewrite(self, data: Any) -> None:
        history, _ = data.draw(st.sampled_from(self.histories))
        changed = [*history[:-1], said(f"never said {self.count}")]
        assert self.ask([*changed, user("so?")], 0, "x").fork is not None

    @invariant()
    def parents_come_first_and_know_their_children(self) -> None:
        for number, node in self.run.tree.nodes.items():
            assert node.parent is None or node.parent < number
            assert node.parent is None or number in self.run.tree.nodes[node.parent].children
            assert (node.parent is None) <= (node.fork is not None)


def mangle(message: Json) -> Json:
    """What a JavaScript client does to a turn: text trimmed, arguments written anew."""
    out = dict(message)
    if message["role"] == "assistant":
        out["content"] = message["content"].strip()
        if message.get("tool_calls"):
            out["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": rewritten(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
    return out


def rewritten(arguments: str) -> str:
    value = {key: int(one) if one == int(one) else one for key, one in json.loads(arguments).items()}
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


TestAgents = Agents.TestCase
TestAgents.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.lists(st.sampled_from("abc"), min_size=1, max_size=6)
)
def test_two_texts_that_differ_are_two_conversations(one: list[str], other: list[str]) -> None:
    run = Recorded()
    run.ask([user("".join(one))], said("a reply"))
    place = run.tree.place([user("".join(other)), said("a reply"), user("and?")], [])
    assert (place.parent == 0) == (one == other)
