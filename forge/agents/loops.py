"""The loops of forge.scaffolds.LOOPS, by name: from an episode to its answer, "" where there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from forge.agents.episode import Episode
from forge.domains.base import ToolError
from forge.domains.tools import function_schema, string_arguments

#: attempts of a failed turn, of `retry`
RETRIES = 3
#: conversations of `vote`
VOTES = 3
DELEGATE = function_schema("delegate", "Let a sub-agent do a task, told in full, and return its answer.", "task")


async def plain(episode: Episode) -> str:
    reply = await episode.act(episode.begin())
    return reply.text if reply else ""


async def retry(episode: Episode) -> str:
    reply = await episode.act(episode.begin(), retries=RETRIES)
    return reply.text if reply else ""


async def plan(episode: Episode) -> str:
    """Whoever calls tools instead of planning acts already."""
    talk = episode.begin()
    episode.say(talk, episode.style.words.plan)
    reply = await episode.ask(talk)
    if reply.calls:
        await episode.use(talk, reply)
    else:
        episode.hear(talk, reply)
        episode.say(talk, episode.style.words.act)
    answer = await episode.act(talk)
    return answer.text if answer else ""


async def reflect(episode: Episode) -> str:
    talk = episode.begin()
    first = await episode.act(talk)
    if first is None:
        return ""
    episode.hear(talk, first)
    episode.say(talk, episode.style.words.check)
    checked = await episode.act(talk)
    return (checked or first).text


async def vote(episode: Episode) -> str:
    """Of answers given equally often the first."""
    replies = [await episode.act(episode.begin()) for _ in range(VOTES)]
    answers = Counter(reply.text.strip() for reply in replies if reply)
    return max(answers, key=lambda answer: answers[answer]) if answers else ""


async def delegate(episode: Episode) -> str:
    talk = episode.begin([DELEGATE])

    async def sub_agent(arguments: Mapping[str, Any]) -> str:
        (task,) = string_arguments(arguments, "task")
        reply = await episode.act(episode.begin(prompt=task, told=""))
        if reply is None:
            raise ToolError("the sub-agent gave no answer")
        return reply.text

    talk.own["delegate"] = sub_agent
    reply = await episode.act(talk)
    return reply.text if reply else ""


#: `single` and `react` are plain, with another judgement of what a reply is
RUN: Mapping[str, Callable[[Episode], Awaitable[str]]] = {
    "plain": plain,
    "single": plain,
    "retry": retry,
    "plan": plan,
    "reflect": reflect,
    "vote": vote,
    "react": plain,
    "delegate": delegate,
}
