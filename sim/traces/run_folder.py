"""Traces of our own runs, live or simulated: each member of an item is a session.

A member's requests are those answered in full (`sim.paths`); between an answer and the next request passes what passed
in the run: tools, thinking, and what a request that was lost took. A session starts when its item was submitted.

A trace has lengths, no tokens, so what prompts share is inferred. An item's members share their first prompt as far as
full blocks go, if it has one length for all. A prompt that is at least as long as the previous one with its answer
contains both. A shorter one is a rewritten context: of it the group's prompt is kept, if it has as many blocks, and the
rest is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from forge import trace as ev
from forge.types import ForgeError
from sim.paths import Path as Member
from sim.paths import read_paths
from sim.sessions import Path as Chains
from sim.sessions import Session, Step
from sim.traces.reading import Recorded, block_size, positive, recorded


def load(path: Path, speed: float = 1.0, block: int = 16) -> Recorded:
    """`path`: the folder, or its trace.jsonl. `speed`: items come that many times as fast. Raises ForgeError."""
    positive("speed", speed)
    block_size(block)
    items = read_paths(ev.read(path / "trace.jsonl" if path.is_dir() else path)).items
    ids = count()
    sessions: list[Session] = []
    for position, members in items.items():
        asked = {number: member for number, member in members.items() if member.asks}
        lengths = {member.asks[0].prompt_tokens for member in asked.values()}
        common = lengths.pop() // block if len(lengths) == 1 and len(members) > 1 else 0
        group = ((next(ids), common),) if common else ()
        sessions += [
            _session(f"{position}.{number}", member, speed, _Growth(group, block, ids))
            for number, member in asked.items()
        ]
    if not sessions:
        raise ForgeError(
            f"{path}: of {len(items)} items no request was answered to its end; give a run that served some"
        )
    return recorded(path, block, sessions)


def _session(name: str, member: Member, speed: float, growth: _Growth) -> Session:
    steps = []
    free = member.submitted_s
    for i, ask in enumerate(member.asks):
        following = member.asks[i + 1] if i + 1 < len(member.asks) else None
        output = max(1, ask.tokens)
        whole = ask.prompt_tokens + output
        keep = following is not None and following.prompt_tokens >= whole
        step = Step(
            prompt=ask.prompt_tokens,
            output=output,
            path=growth.path(ask.prompt_tokens, whole),
            keep=keep,
            after=(i - 1,) if i else (),
            delay_s=max(0.0, ask.routed_s - free),
        )
        steps.append(step)
        free = ask.completed_s
    return Session(name=name, start_s=member.submitted_s / speed, steps=tuple(steps))


class _Growth:
    """A member's paths: the group's chain, then one of its own that grows until the context is rewritten."""

    def __init__(self, group: Chains, block: int, ids: Iterator[int]) -> None:
        self._group = self._front = group
        self._block = block
        self._ids = ids
        self._own = next(ids)
        self._least = 0  # tokens of the last prompt and its answer

    def path(self, prompt: int, whole: int) -> Chains:
        """Of the next prompt. `whole`: tokens of it and its answer."""
        blocks = prompt // self._block
        if prompt < self._least:
            self._own = next(self._ids)
            self._front = self._group if blocks >= _blocks(self._group) else ()
        self._least = whole
        return (*self._front, (self._own, blocks - _blocks(self._front)))


def _blocks(path: Chains) -> int:
    return sum(blocks for _, blocks in path)
