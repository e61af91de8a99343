"""Text to token ids, remembering the pieces a growing conversation repeats on every turn.

Added tokens (`<|im_start|>` and the like) are cut out of the text before anything else happens to it, and what
lies between them is tokenised piece by piece, so remembering pieces is exact. That holds unless a tokenizer lets
added tokens swallow neighbours or treats the first piece specially; such tokenizers run uncached.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_INDEPENDENT = {"ByteLevel", "Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation", "Sequence"}
#: Characters of text whose pieces are remembered before starting afresh (about 100 MB at worst).
CACHE_CHARS = 8_000_000


class PromptTokenizer:
    """`encode` equals `tokenizer.encode(text, add_special_tokens=False).ids`, only faster on repeated text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: index for index, token in added.items()}
        self.cached = bool(self._added) and _pieces_are_independent(json.loads(tokenizer.to_str()))
        # Longest first: the tokenizer takes the leftmost, then the longest match.
        names = sorted(self._added, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")")
        self._pieces: dict[str, list[int]] = {}
        self._chars = 0

    def encode(self, text: str) -> tuple[int, ...]:
        if not self.cached:
            return tuple(self._whole(text))
        ids: list[int] = []
        for index, piece in enumerate(self._split.split(text)):
            if index % 2:
                ids.append(self._added[piece])
            elif piece:
                ids += self._pieces.get(piece) or self._remember(piece)
        return tuple(ids)

    def _remember(self, piece: str) -> list[int]:
        if self._chars + len(piece) > CACHE_CHARS:
            self._pieces.clear()
            self._chars = 0
        self._chars += len(piece)
        ids = self._pieces[piece] = self._whole(piece)
        return ids

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _pieces_are_independent(spec: dict[str, Any]) -> bool:
    """True if splitting at added tokens first cannot change a single id."""
    steps = spec["pre_tokenizer"]
    steps = [steps, *steps.get("pretokenizers", [])] if steps else []
    greedy = any(t["lstrip"] or t["rstrip"] or t["single_word"] for t in spec["added_tokens"])
    unusual = spec["normalizer"] or spec["truncation"] or spec["padding"]
    return not greedy and not unusual and all(step["type"] in _INDEPENDENT for step in steps)
