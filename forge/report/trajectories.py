"""The trajectories that a live run's pool holds: found by name, as rows of a list, with the texts of their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge.report.conversation import Decode, span
from forge.types import ForgeError, ItemState, Json, Trajectory

if TYPE_CHECKING:
    from forge.pool.reader import PoolItem, PoolReader
    from forge.runs import RunFolder


@contextmanager
def reading(folder: RunFolder) -> Iterator[PoolReader]:
    """The run's pool, also beside a running life. Raises ForgeError where there is none."""
    from forge.pool.reader import PoolReader

    path = folder.path / "pool.sqlite"
    if not path.is_file():
        raise ForgeError(f"{folder.path}: holds no pool.sqlite; only live runs keep what agents said")
    with PoolReader(path) as pool:
        yield pool


@dataclass(frozen=True, slots=True)
class Found:
    """An item and those of its trajectories that were asked for."""

    item: PoolItem
    trajectories: list[Trajectory]


def find(pool: PoolReader, name: str) -> Found:
    """By POSITION, all members, or POSITION.MEMBER. Raises ForgeError where none of that name has ended."""
    position, dot, member = name.partition(".")
    if not position.isdecimal() or (dot and not member.isdecimal()):
        raise ForgeError(f"{name}: give POSITION or POSITION.MEMBER, for example 12.3")
    item = pool.item(int(position))
    found = [one for one in pool.trajectories(item.position) if not dot or one.member == int(member)]
    if not found:
        state = f"item {position} is {item.state.value}, with {item.members} members"
        raise ForgeError(f"{name}: no such trajectory has ended; {state}")
    return Found(item, found)


def rows(pool: PoolReader, last: int) -> list[Json]:
    """A row for each trajectory of the newest `last` items, newest first."""
    positions = sorted((p for state in ItemState for p in pool.positions(state)), reverse=True)[:last]
    return [_row(pool.item(p), one) for p in positions for one in pool.trajectories(p)]


def _row(item: PoolItem, one: Trajectory) -> Json:
    begin, end = span(one)
    forks = Counter(c.fork for c in one.completions if c.fork and c.fork != "root")
    return {
        "trajectory": f"{one.position}.{one.member}",
        "domain": item.domain,
        "state": item.state.value,
        "reward": one.outcome.reward,
        "death": one.outcome.reason.value if one.outcome.reason else None,
        "turns": len(one.completions),
        "sampled": sum(len(c.sampled_ids) for c in one.completions),
        "seconds": end - begin,
        "forks": dict(forks),
        "scaffold": one.outcome.scaffold,
    }


def headline(item: PoolItem, one: Trajectory) -> str:
    """What became of a trajectory, in one line."""
    outcome = one.outcome
    faults = "".join(f", {kind} {count}" for kind, count in outcome.faults.items())
    scaffold = f"; {outcome.scaffold}{faults}" if outcome.scaffold else ""
    ended = f"reward {outcome.reward:g}" if outcome.reward is not None else f"died: {outcome.reason} {outcome.detail}"
    begin, end = span(one)
    return (
        f"{one.position}.{one.member}  {item.domain}, difficulty {item.difficulty:g}, {item.state.value}: {ended}  "
        f"({len(one.completions)} completions in {end - begin:.2f} s, {outcome.tool_calls} tool calls, "
        f"{outcome.tool_errors} of them failed, {outcome.tool_wait_s:.2f} s of tools{scaffold})"
    )


def decoder(folder: RunFolder) -> Decode:
    """Ids to all of their text, end-of-turn tokens too. Loads the run's tokenizer."""
    from forge.gateway.chat import HfChatCodec
    from forge.models import resolve

    model = folder.scenario().model
    return HfChatCodec(resolve(model.path), model.tool_prompt).text
