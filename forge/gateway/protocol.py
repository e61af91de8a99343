"""What a wire protocol is to the gateway: a way to read a request, to write a reply, and to say what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from forge.gateway.choices import Choices
from forge.gateway.errors import ApiError
from forge.gateway.generation import Step
from forge.gateway.reading import ReplyPiece
from forge.gateway.request import Request
from forge.types import Json

R = TypeVar("R", bound=Request)


class Reply(Protocol):
    """Writes the answer to one request, as a whole or as a stream, never both.

    A stream is `first`, then `chunk` of every step that shows something, then `last`; `keep_alive` may come anywhere
    between, and `broken` in place of whatever is left.
    """

    def whole(self, choices: Sequence[Sequence[ReplyPiece]]) -> bytes:
        """The body, from the pieces of every choice."""
        ...

    def first(self) -> bytes: ...

    def chunk(self, choice: int, step: Step) -> bytes: ...

    def last(self) -> bytes: ...

    def keep_alive(self) -> bytes:
        """An event that says nothing new. Real ones, because clients do not count comments as a sign of life."""
        ...

    def broken(self, error: ApiError) -> bytes:
        """The status has gone out as 200: the stream itself must say that it failed, and must not look complete."""
        ...


class Dialect(Protocol[R]):
    """One operation of one protocol. Stateless but for what its protocol makes the server remember."""

    @property
    def name(self) -> str:
        """Unique among dialects: retries are joined within one."""
        ...

    def parse(self, data: Json, trajectory: str) -> R:
        """Raises ApiError naming the field at fault. Unknown fields are ignored: every client sends some."""
        ...

    def reply(self, request: R, choices: Choices) -> Reply: ...

    def counted(self, tokens: int) -> Json:
        """The answer to a question for the prompt's length."""
        ...

    def error(self, error: ApiError) -> tuple[int, Json]:
        """(status, body)."""
        ...


AnyDialect = Dialect[Any]
