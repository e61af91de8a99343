"""How many tokens a trainer forwards for an item."""

from __future__ import annotations

from collections.abc import Sequence

from sim.sessions import Step
from sim.work import MemberWork


def train_tokens(members: Sequence[MemberWork], block: int, *, merged: bool) -> int:
    """`merged`: each distinct token once, as prefix-tree merging does; otherwise each append-only stretch of a context
    is a sequence of its own. Where steps have no paths nothing tells what members share: their contexts grow, so each
    one's last prompt and answer hold all before.
    """
    if not any(step.path for member in members for step in member.steps):
        return sum(member.steps[-1].prompt + member.steps[-1].output for member in members)
    if not merged:
        return sum(_length(step) for member in members for step in _last_of_chains(member.steps))
    blocks: dict[int, int] = {}  # of each chain, the most that any step's prompt has
    rest = 0
    for member in members:
        for step in member.steps:
            for chain, length in step.path:
                blocks[chain] = max(blocks.get(chain, 0), length)
        rest += sum(_length(step) - _covered(step, block) for step in _last_of_chains(member.steps))
    return sum(blocks.values()) * block + rest


def _last_of_chains(steps: Sequence[Step]) -> list[Step]:
    """The last step on each chain that grows: what comes after it begins another context."""
    last: dict[int, Step] = {}
    for step in steps:
        last[step.path[-1][0] if step.path else -1] = step
    return list(last.values())


def _length(step: Step) -> int:
    return step.prompt + step.output


def _covered(step: Step, block: int) -> int:
    return sum(length for _, length in step.path) * block
