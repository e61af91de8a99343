"""Claude Code traces as causal sessions: a request follows an answer, and the time between passes again.

Times are whole seconds, answers' durations finer. The wait before a request is its start less the end of what it waits
for, and at least 0; it agrees with the column think_time to a second, and holds where an answer's duration is missing,
before which think_time counts from an older answer. A missing duration is the answer's tokens at the
session's median seconds a token, at most up to the agent's next request. Waits may be a human's: `think_cap_s` caps
them.

A sub-agent starts after the last request that the agent it serves made before it (in file order). That agent's next
request waits for it if it had ended by then, to the times' two seconds; a sub-agent that runs on is in the background,
and nobody waits for it. Requests of one agent that overlap come one after the other.

An answer is kept where the agent's next prompt goes on from this prompt and has room for all of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from forge.types import ForgeError
from sim.sessions import Path as Chains
from sim.sessions import Session, Step
from sim.traces.claude_code_files import Ask, Recording, read
from sim.traces.prefixes import with_answer
from sim.traces.reading import Recorded, recorded, seconds

SLACK_S = 2.0  # what two times in whole seconds may be off
TOKEN_S = 0.043  # seconds a token of an answer, where a session tells of none: the median of the published traces


@dataclass(slots=True)
class _Agent:
    """Of one agent so far: its requests; `served`: the request of its parent it hangs on, None where there is none.

    `offset`: what to add to its clock for the session's.
    """

    asks: list[int]
    served: int | None
    offset: float


def load(path: Path, think_cap_s: float | None = None, every_s: float = 0.0) -> Recorded:
    """`think_cap_s`: longest wait before a request. `every_s`: a session starts so long after the last one: the traces
    do not tell when they began. Blocks are the files' own. Raises ForgeError."""
    if think_cap_s is not None:
        seconds("think_cap_s", think_cap_s)
    seconds("every_s", every_s)
    recordings = [recording for recording in read(path) if recording.asks]
    sizes = {recording.block for recording in recordings}
    if len(sizes) > 1:
        raise ForgeError(f"{path}: blocks of {', '.join(map(str, sorted(sizes)))} tokens; load sessions of one size")
    sessions = [
        Session(name=recording.name, start_s=i * every_s, steps=_Causes(recording).steps(think_cap_s))
        for i, recording in enumerate(recordings)
    ]
    return recorded(path, sizes.pop() if sizes else 0, sessions)


class _Causes:
    """Who waits for whom in one session. `_starts`, `_ends`: seconds on the session's clock, by request."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._asks = recording.asks
        self._next = _next_of_agent(self._asks)
        self._answers = _answer_seconds(self._asks, self._next)
        self._agents: dict[str, _Agent] = {}
        self._starts: list[float] = []
        self._ends: list[float] = []

    def steps(self, cap: float | None) -> tuple[Step, ...]:
        return tuple(self._step(i, ask, cap) for i, ask in enumerate(self._asks))

    def _step(self, i: int, ask: Ask, cap: float | None) -> Step:
        agent = self._agents.get(ask.agent) or self._begin(ask)
        start = ask.t + agent.offset
        after = self._waits(agent, start)
        agent.asks.append(i)
        self._starts.append(start)
        self._ends.append(start + self._answers[i])
        delay = max(0.0, start - max((self._ends[j] for j in after), default=0.0))
        path, keep = self._path(i)
        return Step(
            prompt=ask.prompt,
            output=ask.output,
            path=path,
            keep=keep,
            after=after,
            delay_s=delay if cap is None else min(delay, cap),
        )

    def _begin(self, ask: Ask) -> _Agent:
        parent = self._agents.get(ask.agent.rpartition("/")[0])
        if parent is None:
            agent = _Agent([], None, -self._asks[0].t)
        else:
            served = parent.asks[-1]
            spawned = self._ends[served] if ask.spawned is None else ask.spawned + parent.offset
            agent = _Agent([], served, spawned - ask.t)
        self._agents[ask.agent] = agent
        return agent

    def _waits(self, agent: _Agent, start: float) -> tuple[int, ...]:
        """The agent's last request, and the last of every sub-agent that served it and had ended by `start`."""
        if not agent.asks:
            return () if agent.served is None else (agent.served,)
        last = agent.asks[-1]
        served = [other.asks[-1] for other in self._agents.values() if other.served == last]
        return (last, *(j for j in served if self._ends[j] <= start + SLACK_S))

    def _path(self, i: int) -> tuple[Chains, bool]:
        """Of request i: its path, and whether its answer is kept."""
        prefixes, ask = self._recording.prefixes, self._asks[i]
        path = prefixes.path(ask.number)
        following = self._asks[self._next[i]] if i in self._next else None
        if following is None or following.prompt < ask.prompt + ask.output:
            return path, False
        answer = (ask.prompt + ask.output) // self._recording.block - prefixes.blocks(ask.number)
        kept = with_answer(path, prefixes.path(following.number), answer)
        return (path, False) if kept is None else (kept, True)


def _next_of_agent(asks: tuple[Ask, ...]) -> dict[int, int]:
    latest: dict[str, int] = {}
    following = {}
    for i, ask in enumerate(asks):
        if ask.agent in latest:
            following[latest[ask.agent]] = i
        latest[ask.agent] = i
    return following


def _answer_seconds(asks: tuple[Ask, ...], following: dict[int, int]) -> list[float]:
    known = [ask.api_s / ask.output for ask in asks if ask.api_s is not None]
    token_s = median(known) if known else TOKEN_S
    spans = []
    for i, ask in enumerate(asks):
        span = token_s * ask.output if ask.api_s is None else ask.api_s
        if ask.api_s is None and i in following:
            span = min(span, max(0.0, asks[following[i]].t - ask.t))
        spans.append(span)
    return spans
