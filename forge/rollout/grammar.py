"""Sampling under a grammar: which tokens may come next, by llguidance, which vLLM and others decode under too.

A grammar is a text in llguidance's Lark syntax that the whole completion must be a sentence of, up to the stop token
that ends it; then, and only then, the stop ids are allowed. It needs the `grammar` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from forge.rollout.engine import EngineError, Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

INSTALL = "pip install -e '.[grammar]' -c constraints.txt"


def is_installed() -> bool:
    return find_spec("llguidance") is not None


class Matcher:
    """Where one completion stands in its grammar."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int], ends: Sequence[int]) -> None:
        """`ends`: what the matcher takes for stop ids."""
        self._matcher = matcher
        self._stop_ids = list(stop_ids)
        self._ends = list(ends)

    def forbidden(self, vocab_size: int) -> NDArray[np.bool_]:
        """Of every token id [vocab_size] whether it may not come next. Where the matcher gives up (at a limit of its
        own) the completion can only end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        known = np.unpackbits(bits, bitorder="little")[:vocab_size].view(np.bool_)
        known[self._ends] = False
        forbidden = np.ones(vocab_size, np.bool_)
        forbidden[: len(known)] = ~known
        forbidden[self._stop_ids] = known.any() and not self._matcher.is_accepting()
        return forbidden

    def take(self, token: int) -> None:
        """An allowed token has been sampled."""
        if token not in self._stop_ids:
            self._matcher.consume_token(token)


class Grammars:
    """Matchers for the tokenizer in a model's folder, which is read when the first is asked for: up to a second.

    `vocab_size`: of the model; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, folder: Path | None, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size

    def matcher(self, sampling: Sampling) -> Matcher | None:
        """None without a grammar. Raises EngineError for what is none, and where none can be followed."""
        if sampling.grammar is None:
            return None
        if not sampling.stop_ids:
            raise EngineError("a grammar without a stop id: such a completion could not end")
        matcher = self._parsed(sampling.grammar)
        if matcher.is_error():
            raise EngineError(f"no grammar: {matcher.get_error()}")
        return Matcher(matcher, sampling.stop_ids, self._tokenizer.eos_tokens)

    def fault(self, grammar: str) -> str:
        """Why it cannot be followed; "" where it can."""
        try:
            return str(self._parsed(grammar).get_error())
        except (EngineError, ValueError) as error:  # half a surrogate pair is no text
            return str(error)

    def _parsed(self, grammar: str) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher

        return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not is_installed():
            raise EngineError(f"sampling under a grammar needs llguidance: {INSTALL}")
        if self._folder is None:
            raise EngineError("a grammar, but this model came without a tokenizer")
        from llguidance import LLTokenizer

        try:
            text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size)
        except (OSError, ValueError) as error:
            raise EngineError(f"{self._folder}: its tokenizer cannot follow a grammar: {error}") from None
