"""From recorded trajectories to training samples. Token ids always come from the record, never from text.

Turns of a conversation that only append share one sequence, so a trajectory of T turns costs its last length and not
the sum of T prompts. A rewritten context (compaction, sub-agent, deep think) starts a new sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.train.advantage import batch_advantages
from forge.types import Completion, TrainSample, Trajectory


class RecordError(ValueError):
    """A recorded completion that cannot be trained on; the message names trajectory, index and value."""


@dataclass(slots=True, kw_only=True)
class Strand:
    """One append-only token sequence. `spans` are (first token, index into the given completions) of sampled runs."""

    temperature: float
    token_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)

    def is_prefix_of(self, prompt: tuple[int, ...]) -> bool:
        """Whether the whole strand, sampled tokens included, opens `prompt`."""
        n = len(self.token_ids)
        # The last token decides most mismatches (another turn, another branch) without comparing the rest.
        return n <= len(prompt) and prompt[n - 1] == self.token_ids[-1] and list(prompt[:n]) == self.token_ids


def merge_appends(completions: Sequence[Completion]) -> list[Strand]:
    """Strands that hold every sampled token exactly once, in a span of its own.

    A completion extends the longest earlier strand that opens its prompt (the latest of equals); with none, it starts
    a strand. Where two completions fork from one prefix, the first extends the strand, the second carries the prefix
    again without loss. Only strands sampled at the same temperature are extended, since a sample has one temperature.
    """
    strands: list[Strand] = []
    for i, completion in enumerate(completions):
        _check(completion)
        if not completion.sampled_ids:
            continue  # cancelled before its first token: nothing was sampled, nothing is lost
        fits = [
            strand
            for strand in strands
            if strand.temperature == completion.temperature and strand.is_prefix_of(completion.prompt_ids)
        ]
        if fits:
            strand = max(reversed(fits), key=lambda s: len(s.token_ids))
        else:
            strand = Strand(temperature=completion.temperature)
            strands.append(strand)
        strand.token_ids.extend(completion.prompt_ids[len(strand.token_ids) :])
        strand.spans.append((len(strand.token_ids), i))
        strand.token_ids.extend(completion.sampled_ids)
    return strands


def _check(completion: Completion) -> None:
    where = f"trajectory {completion.trajectory!r}, completion {completion.index}"
    if len(completion.logprobs) != len(completion.sampled_ids):
        raise RecordError(f"{where}: {len(completion.logprobs)} logprobs for {len(completion.sampled_ids)} sampled ids")
    if not all(map(math.isfinite, completion.logprobs)):
        raise RecordError(f"{where}: a logprob is not finite; a token of probability 0 cannot have been sampled")
    if not completion.temperature > 0.0:
        raise RecordError(f"{where}: temperature {completion.temperature}; greedy completions have no policy gradient")


def to_samples(trajectory: Trajectory, advantages: Sequence[float]) -> list[TrainSample]:
    """Training samples of one trajectory; `advantages[t]` goes to every token that completion t sampled."""
    if len(advantages) != len(trajectory.completions):
        raise ValueError(
            f"trajectory {trajectory.id!r}: {len(advantages)} advantages for {len(trajectory.completions)} completions"
        )
    return [_sample(trajectory, strand, advantages) for strand in merge_appends(trajectory.completions)]


def _sample(trajectory: Trajectory, strand: Strand, advantages: Sequence[float]) -> TrainSample:
    n = len(strand.token_ids)
    loss, logprobs, spread = [False] * n, [0.0] * n, [0.0] * n
    for start, i in strand.spans:
        completion = trajectory.completions[i]
        for t, logprob in enumerate(completion.logprobs, start):
            if t == 0:
                continue  # sampled from an empty prompt: nothing precedes it, so the trainer has no logprob for it
            if completion.constrained and logprob == 0.0:
                continue  # the only token that its grammar allowed
            loss[t], logprobs[t], spread[t] = True, logprob, float(advantages[i])
    return TrainSample(
        position=trajectory.position,
        member=trajectory.member,
        token_ids=tuple(strand.token_ids),
        loss=tuple(loss),
        logprobs=tuple(logprobs),
        advantages=tuple(spread),
        temperature=strand.temperature,
    )


def outcome_rewards(trajectory: Trajectory) -> list[float]:
    """Reward per completion where only the outcome pays: all of it on the last completion."""
    if trajectory.outcome.reward is None:
        raise ValueError(f"trajectory {trajectory.id!r} died ({trajectory.outcome.reason}): it has no reward")
    return [0.0] * (len(trajectory.completions) - 1) + [trajectory.outcome.reward]


def batch_samples(
    groups: Sequence[Sequence[Trajectory]], *, gamma: float = 1.0, eps: float = 1e-4
) -> list[TrainSample]:
    """Samples of an optimiser batch from its prompt groups, with advantages from the outcome rewards alone.

    Members that died, or never called the model, are left out; a group left with fewer than two survivors raises
    DeadGroupError. Zero-advantage samples are kept: their tokens belong to the denominator.
    """
    alive = [[m for m in group if m.outcome.reward is not None and m.completions] for group in groups]
    rewards = [[outcome_rewards(member) for member in group] for group in alive]
    advantages = batch_advantages(rewards, gamma=gamma, eps=eps)
    return [
        sample
        for group, of_group in zip(alive, advantages, strict=True)
        for member, of_member in zip(group, of_group, strict=True)
        for sample in to_samples(member, of_member.tolist())
    ]
