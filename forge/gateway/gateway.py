"""The gateway proper: turns a checked request of a trajectory into a generation, new or joined. No HTTP here."""

from __future__ import annotations

from collections import Counter

from forge.gateway.backend import Backend
from forge.gateway.chat import ChatCodec
from forge.gateway.chat_request import ChatRequest
from forge.gateway.chat_template import ChatError
from forge.gateway.errors import invalid, too_long
from forge.gateway.generation import Generation, Job
from forge.gateway.reading import ReplyReader
from forge.gateway.retries import Retries, Ticket
from forge.rollout.engine import Sampling


class Gateway:
    """State of one gateway: open generations by trajectory and body, and completions counted by trajectory.

    `pin_sampling`: temperature, top_p and seed come from the backend whatever the client asks, and the backend's
    max_tokens is a ceiling. Training needs it, because a record tells the temperature but no top_p.
    """

    def __init__(self, backend: Backend, codec: ChatCodec, *, pin_sampling: bool, retry_grace_s: float) -> None:
        self.backend = backend
        self.codec = codec
        self._pin = pin_sampling
        self._retries: Retries[Generation] = Retries(retry_grace_s)
        self._completions: Counter[str] = Counter()

    def join(self, trajectory: str, body: bytes) -> Ticket[Generation] | None:
        """For a marked retry: the generation whose answer was lost, if there is one."""
        return self._retries.join((trajectory, body))

    def start(self, trajectory: str, body: bytes, request: ChatRequest, defaults: Sampling) -> Ticket[Generation]:
        """A new sample. Raises ApiError for what cannot be rendered or does not fit."""
        prompt_ids = self._prompt(request)
        room = self.backend.max_context - len(prompt_ids)
        if room < 1:
            raise too_long(len(prompt_ids), self.backend.max_context)
        reader = ReplyReader(
            self.codec.decode, request.stop, self.codec.tool_stream() if request.calls_allowed else None
        )
        job = Job(
            trajectory=trajectory,
            prompt_ids=prompt_ids,
            sampling=self._sampling(request, defaults, room),
            reader=reader,
            live=request.stream or bool(request.stop),
            one_by_one=bool(request.stop),
        )
        return self._retries.add((trajectory, body), Generation(self.backend, job, self._next_index))

    def leave(self, ticket: Ticket[Generation], *, delivered: bool, may_retry: bool) -> None:
        """A waiter is gone, with its answer or without."""
        self._retries.leave(ticket, delivered=delivered, may_retry=may_retry)

    def forget(self, trajectory: str) -> None:
        """The trajectory is over: cancel what it still generates and drop its counter."""
        self._retries.forget(trajectory)
        self._completions.pop(trajectory, None)

    def close(self) -> None:
        """Cancel every generation."""
        self._retries.close()

    def _prompt(self, request: ChatRequest) -> tuple[int, ...]:
        try:
            # Tools stay in the prompt under tool_choice "none", so that such a turn still extends the last one.
            return self.codec.prompt(request.messages, request.tools)
        except ChatError as error:
            raise invalid("messages", str(error)) from error

    def _sampling(self, request: ChatRequest, defaults: Sampling, room: int) -> Sampling:
        limit = request.max_tokens or defaults.max_tokens
        pinned = self._pin
        return Sampling(
            max_tokens=min(limit, room, defaults.max_tokens) if pinned else min(limit, room),
            temperature=_choose(None if pinned else request.temperature, defaults.temperature),
            top_p=_choose(None if pinned else request.top_p, defaults.top_p),
            stop_ids=tuple(dict.fromkeys(defaults.stop_ids + self.codec.stop_ids)),
            seed=defaults.seed if pinned or request.seed is None else request.seed,
        )

    def _next_index(self, trajectory: str) -> int:
        index = self._completions[trajectory]
        self._completions[trajectory] = index + 1
        return index


def _choose(asked: float | None, default: float) -> float:
    return default if asked is None else asked
