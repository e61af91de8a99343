"""The prompts of one synthetic agent, call by call: how its context grows and is rewritten, and on which chains."""

from __future__ import annotations

from collections.abc import Iterator

from forge.sections_agents import Context
from sim.sessions import Path


class Conversation:
    """`prompt`: tokens of the next prompt. `shared`: chains that hold the full blocks of the first one. `max_context`:
    of the engine, which the agent does not know: an answer is cut to the room it leaves, and no room is a refusal.

    The chains are the shared ones; one of what outlives rewriting, where that is more than the first prompt; and one
    that grows until the context is rewritten.
    """

    __slots__ = ("_base", "_blocks", "_context", "_ids", "_kept", "_last", "_max", "_open", "_own", "_size", "prompt")

    def __init__(
        self,
        context: Context,
        block: int,
        prompt: int,
        shared: Path,
        ids: Iterator[int],
        max_context: int | None = None,
    ) -> None:
        self.prompt = prompt
        self._size = block
        self._last = context.limit_tokens - context.reserve_tokens
        self._context = context
        self._max = context.limit_tokens if max_context is None else min(max_context, context.limit_tokens)
        self._ids = ids
        self._base = shared
        self._blocks = prompt // block  # of the base
        self._own = next(ids)
        self._kept = prompt  # tokens that outlive rewriting
        self._open = context.kept_tokens > prompt  # the base may still grow

    @property
    def refused(self) -> bool:
        """The engine has no room for an answer to the next prompt."""
        return self.prompt >= self._max

    def call(self, output: int, result: int) -> tuple[int, Path, bool]:
        """One call that would sample `output` tokens, and `result` more before the next.

        Returns the tokens it does sample, its path, and whether the next prompt contains the answer.
        """
        prompt = self.prompt
        output = min(output, self._max - prompt)
        following = prompt + output + result
        path = (*self._base, (self._own, prompt // self._size - self._blocks))
        if self._open and following > self._context.kept_tokens:
            path = self._close(path)
        if following <= self._last:
            self.prompt = following
            return output, path, True
        self._own = next(self._ids)
        self.prompt = self._kept + self._context.summary_tokens
        return output, path, False

    def _close(self, path: Path) -> Path:
        """This prompt is the longest to be kept: what comes after it goes on another chain."""
        self._open = False
        self._kept = self.prompt
        if not path[-1][1]:
            return path
        self._base, self._blocks = path, self.prompt // self._size
        self._own = next(self._ids)
        return (*path, (self._own, 0))


def first_prompt(system: tuple[int, int], task: tuple[int, int], block: int) -> tuple[int, Path]:
    """Tokens of a prompt of two parts, each given as chain and tokens, and its path: full blocks of each."""
    prompt = system[1] + task[1]
    pairs = (system[0], system[1] // block), (task[0], prompt // block - system[1] // block)
    return prompt, tuple(pair for pair in pairs if pair[1])
