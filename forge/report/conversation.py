"""A trajectory as a tree of its completions: what each adds, how long it took, which weights sampled what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forge.types import Completion, Trajectory

Decode = Callable[[Sequence[int]], str]

#: characters of a completion's time line
LINE = 32


@dataclass(slots=True)
class Turn:
    """One completion and those that go on from it. `shared`: how many ids its prompt begins with that are its parent's
    prompt and reply; `new_ids` follow them."""

    completion: Completion
    shared: int
    children: list[Turn] = field(default_factory=list)

    @property
    def new_ids(self) -> tuple[int, ...]:
        return self.completion.prompt_ids[self.shared :]


def tree(trajectory: Trajectory) -> list[Turn]:
    """The conversations of a trajectory, in the order in which they began. In a pool that does not say what goes on
    from what, a completion goes on from the longest earlier one that its prompt begins with."""
    told = any(c.fork or c.parent is not None for c in trajectory.completions)
    turns: dict[int, Turn] = {}
    roots: list[Turn] = []
    for c in trajectory.completions:
        parent = turns.get(c.parent) if told and c.parent is not None else None if told else _begun(c, turns)
        whole = () if parent is None else parent.completion.prompt_ids + parent.completion.sampled_ids
        turn = turns[c.index] = Turn(c, common(whole, c.prompt_ids))
        (roots if parent is None else parent.children).append(turn)
    return roots


def _begun(c: Completion, turns: dict[int, Turn]) -> Turn | None:
    wholes = [(t.completion.prompt_ids + t.completion.sampled_ids, t) for t in turns.values()]
    before = [(len(whole), i) for i, (whole, _) in enumerate(wholes) if whole == c.prompt_ids[: len(whole)]]
    return wholes[max(before)[1]][1] if before else None


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def facts(turn: Turn) -> str:
    """One line about a completion, without its text."""
    c = turn.completion
    versions = sorted(set(c.versions))
    shown = "no token" if not versions else f"weights {versions[0]}" + (f" to {versions[-1]}" if versions[1:] else "")
    mean = f", mean logprob {sum(c.logprobs) / len(c.logprobs):.2f}" if c.logprobs else ""
    fork = f"  [{c.fork}]" if c.fork else ""
    return (
        f"#{c.index}{fork}  prompt {len(c.prompt_ids)} ({len(turn.new_ids)} new), sampled {len(c.sampled_ids)}, "
        f"{c.finish}, {shown}{mean}, instance {c.instance}"
    )


def timeline(c: Completion, begin_s: float, end_s: float) -> str:
    """Where in its trajectory's time a completion lies: ░ until its first token, █ from there."""
    scale = LINE / max(end_s - begin_s, 1e-9)
    start, first, end = (round((t - begin_s) * scale) for t in (c.received_s, c.first_token_s, c.finished_s))
    start = min(start, LINE - 1)
    first = min(max(first, start), LINE - 1)
    end = max(end, first + 1)
    return " " * start + "░" * (first - start) + "█" * (end - first) + " " * (LINE - end)


def span(trajectory: Trajectory) -> tuple[float, float]:
    """Seconds of the run's clock from its first request to its last answer."""
    times = [(c.received_s, c.finished_s) for c in trajectory.completions]
    return (min(t for t, _ in times), max(t for _, t in times)) if times else (0.0, 0.0)


def token_rows(c: Completion, decode: Decode) -> list[tuple[str, float, int]]:
    """(text, logprob, weights version) of every sampled token."""
    texts = [decode((one,)) or f"<{one}>" for one in c.sampled_ids]
    return list(zip(texts, c.logprobs, c.versions, strict=True))
