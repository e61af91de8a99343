"""What scaffolds are put together from: loops, dialects, context strategies, prompt styles. Data alone.

What a loop does is in forge.agents.loops, what a strategy does in forge.agents.strategies, under the same names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from forge.formats import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """`told` is what the prompt says of it; `small`: whether a policy that only knows tool calls and answers, as the
    shipped one, can live in it."""

    summary: str
    told: str = ""
    small: bool = False


LOOPS = {
    "plain": Loop(summary="call tools, several a turn, until a reply without calls: the answer", small=True),
    "single": Loop(summary="one call a turn; further ones of a reply are refused", small=True),
    "retry": Loop(summary="a failed turn is folded into a note of why, and tried again, three times", small=True),
    "plan": Loop(summary="first a plan in words, then acting as plain", small=True),
    "reflect": Loop(
        summary="the answer is checked: it is asked for once more, with tools, before it counts", small=True
    ),
    "vote": Loop(summary="three conversations of their own; the commonest answer counts", small=True),
    "react": Loop(
        summary="thought, action, observation; the answer stands behind a mark",
        told="Write a line that begins with `Thought:`, then one call. When you know the answer, write it alone on a "
        "last line that begins with `Answer:`.",
    ),
    "delegate": Loop(
        summary="no tools but `delegate`: a sub-agent with a context of its own has them, and reports its answer",
        told="Hand the task, or a part of it, to a sub-agent with the tool `delegate`; it has the tools you lack.",
    ),
}

#: how results come back in a text dialect: as its format writes them, or plainer
RESULTS = {
    "format": "as the format writes them",
    "bare": "their texts, a line each",
    "named": "`tool: text`, a line each",
    "equals": "`tool=text`, a line each",
}
#: the API's own tool calls, in the format of whoever serves the model; all others are text in the prompt and the reply
NATIVE = "native"
#: dialects of the zoo; any other format of forge.formats may stand in an id too
DIALECTS = (
    NATIVE,
    *(one.family for one in FAMILIES),
    *(f"hermes~{results}" for results in RESULTS if results != "format"),
)

#: context strategies; `-N` is a number of turns, of characters in `cut`
STRATEGIES = {
    "all": "everything is kept",
    "window-N": "the task and the last N turns",
    "drop-N": "results older than the last N turns are left out; their calls stay",
    "cut-N": "results are cut at N characters",
    "extract-N": "turns older than the last N become one note: what was called, and what came of it",
    "fold-N": "every turn older than the last N becomes a note of its own",
    "summarise-N": "when there are more than N turns, the policy writes a summary in place of all of them",
    "own": "the policy's: it has tools that drop, restore, edit, fold and summarise turns",
}
CONTEXTS = ("all", "window-2", "window-4", "drop-1", "cut-16", "extract-1", "extract-2", "fold-1", "summarise-3", "own")
_STRATEGY = re.compile(r"(window|drop|cut|extract|fold|summarise)-([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class Strategy:
    """`kind` is a name of STRATEGIES without its number, `size` that number."""

    kind: str
    size: int = 0

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.size}" if self.size else self.kind


def strategy(name: str) -> Strategy | None:
    """None: there is none of this name."""
    if name in ("all", "own"):
        return Strategy(name)
    found = _STRATEGY.fullmatch(name)
    return Strategy(found[1], int(found[2])) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What loops and strategies say to the policy."""

    plan: str
    act: str
    check: str
    summarise: str
    retry: str


#: short ones cost a small vocabulary few tokens
SHORT = Words(plan="Plan:", act="Solve:", check="Give your final answer.", summarise="Result:", retry="Solve:")
LONG = Words(
    plan="Before you use any tool, write down in a few words how you will go about it.",
    act="Good. Now do it.",
    check="Check this answer against the task, with tools if need be. Then give the final answer, and nothing else.",
    summarise="The conversation grows long. Write all that is needed to go on: what was asked, done and found.",
    retry="That attempt failed, as said above, and was removed. Try another way.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """`tells` says whether a text dialect describes the tools and how to call them: without, the policy must have
    learnt it. `before` and `after` stand around the task's own text."""

    summary: str
    system: str = ""
    before: str = ""
    after: str = ""
    tells: bool = True
    length: Literal["short", "long"] = "long"

    @property
    def words(self) -> Words:
        return SHORT if self.length == "short" else LONG


STYLES = {
    "bare": Style(summary="the task alone", tells=False, length="short"),
    "terse": Style(
        summary="one line in the system prompt",
        system="Solve the following. Give only your final answer.",
        tells=False,
        length="short",
    ),
    "suffix": Style(
        summary="one line below the task", after="\nGive only your final answer.", tells=False, length="short"
    ),
    "prefix": Style(
        summary="one line above the task", before="Find the following result:\n", tells=False, length="short"
    ),
    "helpful": Style(
        summary="an assistant's persona",
        system="You are a helpful assistant with tools. Use them where they help, and answer with the result alone.",
    ),
    "rules": Style(
        summary="numbered rules",
        system="Rules:\n1. Use the tools for anything you can look up or compute.\n2. Never guess.\n"
        "3. Your last message is the answer and nothing but the answer.",
    ),
    "markdown": Style(
        summary="the task below a heading",
        system="You complete tasks.",
        before="# Task\n\n",
        after="\n\n# Answer\n\nThe result alone, without any explanation.",
    ),
    "tagged": Style(
        summary="the task in tags",
        system="The task stands in <task> tags. Reply with the final result only.",
        before="<task>\n",
        after="\n</task>",
    ),
}
