"""Responses that a later request may go on from, by `previous_response_id` or by reference to an item."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from forge.gateway.errors import ApiError, invalid
from forge.types import Json

#: characters of conversations kept before the oldest responses are forgotten
MOST_CHARS = 64_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """`messages`: the conversation with the reply, without instructions, which are not carried over."""

    messages: Sequence[Json]
    item_ids: tuple[str, ...]
    chars: int


class ResponseStore:
    """Kept by trajectory: an id of one is unknown in another."""

    def __init__(self) -> None:
        self._responses: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._items: dict[tuple[str, str], Json] = {}
        self._chars = 0

    def add(self, trajectory: str, response_id: str, messages: Sequence[Json], items: Sequence[Json]) -> None:
        key = (trajectory, response_id)
        if key in self._responses:  # a retry is told the same response
            return
        for item in items:
            self._items[trajectory, item["id"]] = item
        chars = sum(len(message["content"]) for message in messages)
        self._responses[key] = Stored(messages, tuple(item["id"] for item in items), chars)
        self._chars += chars
        while self._chars > MOST_CHARS and len(self._responses) > 1:
            (owner, _), oldest = self._responses.popitem(last=False)
            self._chars -= oldest.chars
            for item_id in oldest.item_ids:
                self._items.pop((owner, item_id), None)

    def messages(self, trajectory: str, response_id: str) -> Sequence[Json]:
        """Raises ApiError in the protocol's own words for what is not kept."""
        try:
            return self._responses[trajectory, response_id].messages
        except KeyError:
            message = f"Previous response with id {response_id!r} not found."
            raise invalid("previous_response_id", message, "previous_response_not_found") from None

    def item(self, trajectory: str, item_id: str) -> Json:
        try:
            return self._items[trajectory, item_id]
        except KeyError:
            raise ApiError(404, f"Item with id {item_id!r} not found.", param="input") from None
